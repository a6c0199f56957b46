"""The words the demo model knows, the prompt's form, and the image sizes every other file needs.

The word list is closed: both tasks are generated or read from templates, so 128 ids are enough and the embedding stays
small. `encode` is the training-time twin of the saved tokenizer (`saving.py`); a test holds the two together.
"""

import re

IMAGE_SIZE = 64
PATCH = 8
IMAGE_TOKENS = (IMAGE_SIZE // PATCH) ** 2

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "teal": (0, 128, 128),
    "black": (0, 0, 0),
    "gray": (128, 128, 128),
    "brown": (165, 42, 42),
}
SHAPES = ("circle", "rectangle", "triangle")

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
PAD, BOS, EOS, UNK, IMAGE = range(5)
_WORDS = " ".join(
    (
        "user assistant : , ? . image what is the number in row column color shape of does contain a not there no yes",
        "present where left right above below to and or how many which are images it same different",
    )
).split()
_KNOWN = list(dict.fromkeys([*SPECIAL, *"0123456789", *_WORDS, *COLORS, *SHAPES]))
VOCABULARY = _KNOWN + [f"<extra_{i}>" for i in range(128 - len(_KNOWN))]
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(k=0) %}{% for m in messages %}{{ m['role'] }} :"
    "{% if m['content'] is string %} {{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}{% set ns.k = ns.k + 1 %} image {{ ns.k }} : <image>"
    "{% elif c['type'] == 'text' %} {{ c['text'] }}{% endif %}{% endfor %}{% endif %} "
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def encode(text: str) -> list[int]:
    """Token ids of `text`: lower case, digits one by one, words, marks; anything unknown is `<unk>`."""
    return [TOKEN_IDS.get(word, UNK) for word in re.findall(r"<image>|\d|[a-z]+|[^\w\s]", text.lower())]


def prefix_ids(images: int) -> list[int]:
    """Ids of the prompt up to the question, `<s> user : image 1 : <image> x 64 image 2 : ...`."""
    ids = [BOS, *encode("user :")]
    for k in range(images):
        ids += encode(f"image {k + 1} :") + [IMAGE] * IMAGE_TOKENS
    return ids


def question_ids(question: str) -> list[int]:
    """Ids from the question to the point where the answer starts."""
    return encode(question) + encode("assistant :")
