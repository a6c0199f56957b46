"""Requests of /v1/chat/completions: what is understood of OpenAI's, what is refused, and what is ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from engines.errors import UserError
from runtime.sampling import Sampling
from runtime.server import images
from runtime.server.errors import Refused
from runtime.server.images import File, Image
from runtime.server.remote import Host
from runtime.server.room import PACKED, PIECE, READING, UNPACKING

# Values with which these ask for nothing; with any other they are refused by name. None never asks for anything.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "functions": [],
    "tool_choice": "none",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "store": False,
    "parallel_tool_calls": False,
}
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # they change no answer
FORM, FILE = "request", "image"  # fields of a multipart request
FILES = 64
TOP_LOGPROBS = 20
CHARACTERS = 16  # that a token of a prompt has at most, on average: what is longer cannot fit, and is not tokenized
STOP = 256  # characters of a stop string
PIECES = 2**14  # that a request may have: fields and elements, by its commas and brackets


class Part(BaseModel):
    """Unknown fields are refused, null is the same as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _present(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class Text(Part):
    type: Literal["text"]
    text: str


class ImageUrl(Part):
    url: str
    detail: str = "auto"  # a bundle's images have one size


class ImageByUrl(Part):
    type: Literal["image_url"]
    image_url: ImageUrl


class ImageFile(Part):
    """The next file of a multipart request."""

    type: Literal["image"]


class Message(Part):
    role: Literal["developer", "system", "user", "assistant"]
    content: Annotated[
        list[Annotated[Text | ImageByUrl | ImageFile, Field(discriminator="type")]],
        BeforeValidator(lambda content: [{"type": "text", "text": content}] if isinstance(content, str) else content),
    ]
    name: str = ""  # chat templates have no place for it
    annotations: list[Any] = []  # in answers that come back as history


class StreamOptions(Part):
    include_usage: bool = False
    include_obfuscation: bool = False


class Extra(Part):
    """What OpenAI's interface does not know.

    Attributes:
        kept_patches: tell which patches of the images the cache holds.
        question_later: compress the images before the model has seen what follows them.
    """

    kept_patches: bool = False
    question_later: bool = False


class ChatRequest(Part):
    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(max_length=STOP)]],
        Field(max_length=16),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    unicache: Extra = Extra()

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in IGNORED and not _is_neutral(key, value)}

    @property
    def tokens(self) -> int | None:
        """Of the answer, at most."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def image_urls(self) -> list[str]:
        return [part.image_url.url for each in self.messages for part in each.content if isinstance(part, ImageByUrl)]

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.stop,
            self.seed,
            (self.top_logprobs or 0) if self.logprobs else None,
        )


def _is_neutral(key: str, value: Any) -> bool:
    return key in NEUTRAL and value == NEUTRAL[key]


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        queue: requests that wait beside the one that is answered.
        body_bytes: of a request.
        body_seconds: until a request has arrived, with the images that are fetched for it.
        pixels: of an image, by its header.
        tokens: of an answer.
        image_hosts: from which images are fetched.
    """

    queue: int = 16
    body_bytes: int = 32 * 2**20
    body_seconds: float = 60
    pixels: int = 32 * 10**6
    tokens: int = 1024
    image_hosts: frozenset[Host] = frozenset()


@dataclass(frozen=True)
class Asked:
    """A request as the runtime takes it."""

    request: ChatRequest
    messages: list[dict[str, Any]]
    images: list[Image]
    max_new_tokens: int
    sampling: Sampling


def parse(body: bytes, limits: Limits, take: Callable[[int], None] = lambda count: None) -> ChatRequest:
    """Check a request's JSON, all but its images.

    Args:
        take: called with bytes of memory before they are allocated; it refuses what there is no room for.

    Raises:
        Refused: it is not understood, asks for what is not supported, or is over a limit.
    """
    if (pieces := sum(map(body.count, (b",", b"{", b"[")))) > PIECES:  # each is an object, or is in a text
        message = f"{pieces} commas and opening brackets are more than the {PIECES} of a request: send fewer parts"
        raise Refused(413, message, "too_large")
    wide = not body.isascii() or b"\\u" in body  # Python gives all letters of a text the width of its widest
    take(PIECE * pieces + READING * wide * len(body))
    try:
        asked = ChatRequest.model_validate_json(body)
        _ = asked.sampling
    except ValidationError as error:
        raise _refused(error) from error
    except UserError as error:
        field = str(error).partition(" ")[0].rstrip(",")  # such messages begin with it
        raise Refused(
            400, str(error), "invalid_request", field if field in ChatRequest.model_fields else None
        ) from error
    if (tokens := asked.tokens or 0) > limits.tokens:
        message = f"max_tokens must be at most {limits.tokens}, got {tokens}: serve --max-tokens allows more"
        raise Refused(400, message, param="max_tokens")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise Refused(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return asked


def complete(
    asked: ChatRequest,
    files: list[bytes] | None,
    fetched: Mapping[str, File],
    limits: Limits,
    take: Callable[[int], None] = lambda count: None,
) -> Asked:
    """Put a request's images in their places, and check their headers.

    Args:
        files: those of a multipart request.
        fetched: by their URLs.

    Raises:
        Refused: one is missing, is no image, or is over a limit; or there is no question about them.
    """
    messages, sent = _with_images(asked.messages, files, fetched)
    take(UNPACKING * any(kind in each.data for each in sent for kind in PACKED))  # one after another
    upright = asked.unicache.kept_patches
    checked = [images.check(each, limits.pixels, number, upright) for number, each in enumerate(sent, 1)]
    question = next((message.content for message in reversed(asked.messages) if message.role == "user"), [])
    if not any(isinstance(part, Text) and part.text.strip() for part in question):  # as `ask` does, with images or not
        raise Refused(400, "the question is empty: the last user message needs a text", param="messages")
    return Asked(asked, messages, checked, asked.tokens or limits.tokens, asked.sampling)


def check_length(messages: list[dict[str, Any]], positions: int) -> None:
    """Refuse, before any template or tokenizer, what is far too long for a level of so many positions."""
    if len(messages) > positions:
        message = f"{len(messages)} messages are more than the {positions} positions of this level: send the last ones"
        raise Refused(400, message, "context_length_exceeded", "messages")
    characters = sum(len(part.get("text", "")) for message in messages for part in message["content"])
    if characters > (most := CHARACTERS * max(positions, 256)):
        message = (
            f"the messages have {characters} characters, more than the {most} that this level reads: send less text"
        )
        raise Refused(400, message, "context_length_exceeded", "messages")


def _with_images(
    messages: list[Message], files: list[bytes] | None, fetched: Mapping[str, File]
) -> tuple[list[dict[str, Any]], list[File]]:
    """Messages as the runtime takes them, and the images' files in their order."""
    result: list[dict[str, Any]] = []
    sent: list[File] = []
    waiting = list(map(File, files or []))
    placed = any(isinstance(part, ImageFile) for message in messages for part in message.content)
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for number, message in enumerate(messages):
        content: list[dict[str, str]] = []
        if number == last and not placed:  # files that no message names stand before the last question
            sent, content, waiting = sent + waiting, [{"type": "image"}] * len(waiting), []
        for part in message.content:
            if isinstance(part, Text):
                content.append({"type": "text", "text": part.text})
                continue
            if isinstance(part, ImageFile) and not waiting:
                raise Refused(400, 'more parts {"type": "image"} than files', "invalid_image", "messages")
            sent.append(waiting.pop(0) if isinstance(part, ImageFile) else images.at(part.image_url.url, fetched))
            content.append({"type": "image"})
        result.append({"role": "system" if message.role == "developer" else message.role, "content": content})
    if waiting:
        raise Refused(400, f"{len(waiting)} files are in no message", "invalid_image", "messages")
    return result, sent


def _refused(error: ValidationError) -> Refused:
    """The first mistake, by its name."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = first["loc"]
    if path[2:3] == ("content",):  # messages, 1, content, 2, the kind of part, its field
        path = path[:4] + path[5:]
    name = ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        return Refused(400, f"parameter {name!r} is not supported", "unsupported_parameter", name)
    return Refused(400, f"{name}: {first['msg']}" if name else first["msg"], "invalid_request", name or None)
