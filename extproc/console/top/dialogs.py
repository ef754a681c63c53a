"""What stands in front of the tables: a text to read, a question for an id, and the question before an action."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from extproc.console.top.actions import Action, body_of

__all__ = ["AskAction", "AskId", "Reading"]

CSS = """
ModalScreen { align: center middle; background: $background; }
.front { width: 90%; height: auto; max-height: 90%; padding: 1 2; background: $surface; }
.front Input { border: none; height: 1; background: $panel; margin-bottom: 1; }
.front Input:focus { text-style: underline; }
"""


class Reading(ModalScreen[None]):
    """A text, which may be longer than the screen."""

    CSS = CSS
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,space", "dismiss", "back")]

    def __init__(self, text: str) -> None:
        """It is shown as it is, without markup."""
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        """The text, and how to leave it."""
        with VerticalScroll(classes="front"):
            yield Static(Text(self.text), id="text")
            yield Static(Text("\n[Esc] back"))


class AskId(ModalScreen[str | None]):
    """Asks which request."""

    CSS = CSS
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "back")]

    def compose(self) -> ComposeResult:
        """One line to write in."""
        with Vertical(classes="front"):
            yield Static(Text("Explain which request? Its x-request-id, or its ticket:"))
            yield Input(max_length=200, id="name")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter."""
        self.dismiss(event.value.strip() or None)


class AskAction(ModalScreen[dict[str, Any] | None]):
    """Asks whether really. Answers with what is to be sent along; None when it is not to be done."""

    CSS = CSS
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "back")]

    def __init__(self, action: Action) -> None:
        """Nothing is done before Enter."""
        super().__init__()
        self.action = action

    def compose(self) -> ComposeResult:
        """The question, and a line for each thing that may be said."""
        with Vertical(classes="front"):
            yield Static(Text(f"Really {self.action.words}?\n"), id="question")
            if self.action.lasts:
                yield Static(Text("For how many seconds? (empty: until it is undone)"))
                yield Input(max_length=20, id="for_s")
            yield Static(Text("Why? (for the audit log)"))
            yield Input(max_length=500, id="reason")
            yield Static(id="wrong")
            yield Static(Text("[Enter] do it   [Tab] next line   [Esc] leave it"))

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Enter, in whichever line."""
        told = {line.id: line.value for line in self.query(Input)}
        try:
            body = body_of(self.action, told.get("for_s", ""), told.get("reason", ""))
        except ValueError as error:
            self.query_one("#wrong", Static).update(Text(str(error)))
        else:
            self.dismiss(body or {})
