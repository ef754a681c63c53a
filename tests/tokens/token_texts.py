"""Texts that look real, made from a seed: prose, Chinese, code, JSON, base64, and patchworks of them."""

import base64
import json
import random

# fmt: off
_WORDS = [
    "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not",
    "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you",
    "were", "all", "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "no",
    "more", "if", "out", "so", "up", "said", "what", "its", "about", "than", "into", "them", "can", "only", "other",
    "time", "new", "some", "could", "these", "two", "may", "first", "then", "do", "any", "like", "my", "now",
    "over", "such", "our", "man", "me", "even", "most", "made", "after", "also", "did", "many", "before", "must",
    "through", "years", "where", "much", "your", "way", "well", "down", "should", "because", "each", "just",
    "state", "people", "how", "too", "little", "good", "world", "make", "very", "year", "still", "see", "own",
    "work", "long", "here", "get", "both", "between", "being", "under", "never", "day", "government",
    "international", "administration", "recommendation", "infrastructure", "characteristics", "responsibility",
    "configuration", "throughput", "latency", "tokens", "queue", "provider", "upstream", "deadline", "capacity",
    "scheduler", "benchmark", "retrieval", "embedding", "gradient",
]
_CHINESE = [
    "的", "一", "是", "在", "不", "了", "有", "和", "人", "这", "中", "大", "为", "上", "个", "国", "我", "以",
    "要", "他", "时", "来", "用", "们", "生", "到", "作", "地", "于", "出", "就", "分", "对", "成", "会", "可",
    "主", "发", "年", "动", "同", "工", "也", "能", "下", "过", "我们", "他们", "公司", "问题", "系统", "模型",
    "数据", "请求", "服务", "处理", "用户", "时间", "配置", "性能", "网络", "队列", "限流", "因为", "所以", "但是",
    "如果", "需要", "可以", "已经", "进行", "人工智能", "计算机", "操作系统", "分布式", "一致性", "负载均衡",
]
# fmt: on
_CODE = (
    "def {a}({b}, {c}=None):\n    {d} = [{b}.{a}({c}) for {b} in self._{d} if {b} is not None]\n    return {d}\n\n",
    'if {a} >= len({b}):\n    raise ValueError(f"{c} must be less than {{len({b})}}")\n',
    "    for (int {a} = 0; {a} < {b}->{c}; ++{a}) {{\n        {d}[{a}] += {b}->values[{a}] * 0x1f;\n    }}\n",
    "import {{ {a}, {b} }} from '../{c}/{d}';\n\nexport const {c} = async ({b}) => await {a}({b}?.{d} ?? {{}});\n",
)


def prose(rng, size):
    """English sentences."""
    text = ""
    while len(text) < size:
        words = [rng.choice(_WORDS) for _ in range(rng.randint(5, 25))]
        text += " ".join(words).capitalize() + rng.choice(
            [". ", ". ", "? ", ".\n", ".\n\n", ", said Ms. Okonkwo-Lindqvist. "]
        )
    return text[:size]


def chinese(rng, size):
    """Chinese sentences; a third of the characters, as each has three bytes."""
    text = ""
    while len(text) < size // 3:
        text += "".join(rng.choice(_CHINESE) for _ in range(rng.randint(5, 20))) + rng.choice("。,?;\n")
    return text[: size // 3]


def code(rng, size):
    """Three languages' worth of snippets."""
    text = ""
    while len(text) < size:
        names = {key: rng.choice(_WORDS) + rng.choice(["", "_id", "Count", "s", "2"]) for key in "abcd"}
        text += rng.choice(_CODE).format(**names)
    return text[:size]


def data(rng, size):
    """JSON records."""
    records = []
    while len(records) * 60 < size:
        records.append(
            {
                "id": rng.randrange(10**9),
                "name": rng.choice(_WORDS),
                "score": round(rng.random(), 4),
                "ok": rng.random() < 0.5,
            }
        )
    return json.dumps(records)[:size]


def encoded(rng, size):
    """Base64 without a space."""
    return base64.b64encode(rng.randbytes(size * 3 // 4)).decode()[:size]


KINDS = (prose, chinese, code, data, encoded)


def patchwork(rng, size):
    """Pieces of every kind, from a line to a few pages."""
    text = ""
    while len(text.encode()) < size:
        text += rng.choice(KINDS)(rng, rng.choice([200, 1_500, 6_000]))
    return text


def halves(rng, size):
    """Prose, then Chinese."""
    share = rng.random()
    return prose(rng, int(size * share)) + chinese(rng, int(size * (1 - share)))


def stripes(rng, size):
    """Prose and Chinese in turn, in stripes that may fall into step with a sampler."""
    width = rng.choice([100, 256, 512, 1_024, 4_096])
    english, other = prose(rng, size), chinese(rng, size)
    pairs = zip(range(0, size, width), range(0, size // 3, width // 3), strict=False)
    return "".join(english[a : a + width] + other[b : b + width // 3] for a, b in pairs)[: size // 2]


def blanks(rng, size):
    """Made to mislead: cheap runs of blanks between dear base64."""
    text = ""
    while len(text) < size:
        text += " " * rng.randrange(3_000) + encoded(rng, rng.randrange(4, 2_000))
    return text


def make(kind, seed, size):
    """Make one text from its seed."""
    return kind(random.Random(seed), size)
