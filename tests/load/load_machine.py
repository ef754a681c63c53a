"""CPU time of processes and of the machine, from /proc. Linux only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, summed over its threads: by the scheduler's own count, else in clock ticks."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except (OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S


def busy_s() -> float:
    """CPU seconds that the whole machine has worked, stolen time included."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * TICK_S


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds at one moment: of each named process, and of the whole machine."""

    of: dict[str, float]
    machine: float

    @classmethod
    def now(cls, pids: dict[str, int]) -> Reading:
        """Read all."""
        return cls({name: cpu_s(pid) for name, pid in pids.items()}, busy_s())

    def __sub__(self, before: Reading) -> Reading:
        return Reading({name: self.of[name] - before.of[name] for name in self.of}, self.machine - before.machine)

    @property
    def foreign(self) -> float:
        """CPU seconds of everybody else."""
        return max(0.0, self.machine - sum(self.of.values()))
