"""A tiny processor for every family of `zoo.py`: word-level tokenizer, image processor, chat template.

It writes as many tokens for a picture as the tiny model's encoder gives; GOT-OCR2's always writes 256 of them
(`GotOcr2Processor.num_image_tokens`).

`save("smolvlm", folder)` writes one as a checkpoint's, beside the model that `zoo.model("smolvlm")` saves there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers as hf
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from export.preprocessors import processor_class
from tests.export.zoo import END, IMAGE, PINPOINTS, START, TEXT, VIDEO

WORDS = [
    "user",
    "assistant",
    "?",
    "what",
    "is",
    "in",
    "the",
    "image",
    "and",
    "this",
    "red",
    "blue",
    "OCR",
    "TILE_GLOBAL",
    *"0123456789<>.",  # a video's times
    "seconds",
]
TILES = [f"TILE_{i}" for i in range(1, 7)]
SIDE, PATCH = 56, 14  # of zoo.py's encoders
SQUARE = {"height": SIDE, "width": SIDE}
TURN = "<|im_start|>"  # of families that mark turns


@dataclass(frozen=True)
class Tiny:
    """What a family's processor is made of.

    Attributes:
        processor: from a tokenizer.
        placeholder: what the chat template writes for an image; `video`: for a video.
        tokens: special tokens, of which some must have the id that the model's configuration names.
        named: special tokens that the tokenizer knows by a name.
        begin: what a prompt begins with.
    """

    processor: Callable[[Any], Any]
    placeholder: str
    tokens: Mapping[str, int | None]
    named: dict[str, str]
    begin: str = "{{ bos_token }}"
    video: str = ""


def _rows(count: int = 4) -> dict[str, None]:
    return {f"<row_{r}_col_{c}>": None for r in range(1, count + 1) for c in range(1, count + 1)}


def _splits(processor: Any, image_processor: Any, **more: Any) -> Tiny:
    pictures = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    marks = {"<fake_token_around_image>": None, "<end_of_utterance>": None, "<global-img>": None, **_rows()}
    return Tiny(
        lambda tokenizer: processor(image_processor(**pictures), tokenizer, image_seq_len=4, **more),
        "<image>",
        {"<image>": IMAGE, **marks},
        {},
    )


def _patches(processor: Any, image_processor: Any, marks: tuple[str, ...], patch: int = PATCH) -> Tiny:
    """Qwen's kind; `marks`: image, video, and what stands around either."""
    pixels = {"size": {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 24 * (2 * patch) ** 2}}
    if image_processor is hf.Glm4vImageProcessorPil:  # which counts the pixels of both frames
        pixels = {"size": {name: 2 * count for name, count in pixels["size"].items()}}
    image, video, start, end, *around = marks
    around = around or [start, end]
    return Tiny(
        lambda tokenizer: processor(image_processor(patch_size=patch, **pixels), tokenizer),
        f"{start}{image}{end}",
        dict(zip(marks, (IMAGE, VIDEO, START, END, 305, 306), strict=False)),
        {"image_token": image, "video_token": video},
        "",
        f"{around[0]}{video}{around[1]}",
    )


def _tiles(limits: dict[str, Any], side: int = SIDE) -> Any:
    size = {"height": side, "width": side}
    return hf.GotOcr2ImageProcessorPil(size=size, crop_to_patches=bool(limits), **limits)


def _anyres(image_processor: Any, **more: Any) -> Any:
    return image_processor(image_grid_pinpoints=PINPOINTS, **more)


def _pixtral(merge: int) -> Tiny:
    def make(tokenizer: Any) -> Any:
        patch = {"height": PATCH, "width": PATCH}
        pictures = hf.PixtralImageProcessorPil(size={"longest_edge": 2 * SIDE}, patch_size=patch)
        return processor_class("PixtralProcessor")(pictures, tokenizer, patch_size=PATCH, spatial_merge_size=merge)

    return Tiny(make, "[IMG]", {"[IMG]": IMAGE, "[IMG_BREAK]": None, "[IMG_END]": None}, {})


def _clip(tokenizer: Any) -> Any:
    pictures = hf.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SQUARE)
    return hf.LlavaProcessor(
        pictures, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _llava_next(tokenizer: Any) -> Any:
    pictures = _anyres(hf.LlavaNextImageProcessorPil, size={"shortest_edge": SIDE}, crop_size=SQUARE)
    return hf.LlavaNextProcessor(
        pictures, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _llava_onevision(tokenizer: Any) -> Any:
    return processor_class("LlavaOnevisionProcessor")(
        _anyres(hf.LlavaOnevisionImageProcessorPil, size=SQUARE),
        tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )


def _internvl(tokenizer: Any) -> Any:
    pictures = _tiles({"min_patches": 1, "max_patches": 6})
    return processor_class("InternVLProcessor")(pictures, tokenizer, image_seq_length=4)


def _aya(tokenizer: Any) -> Any:
    pictures = _tiles({"min_patches": 1, "max_patches": 6})
    return hf.AyaVisionProcessor(pictures, tokenizer, patch_size=PATCH, img_size=SIDE, downsample_factor=2)


def _paligemma(tokenizer: Any) -> Any:
    pictures: Any = hf.SiglipImageProcessorPil(size=SQUARE)
    pictures.image_seq_length = (SIDE // PATCH) ** 2
    return hf.PaliGemmaProcessor(pictures, tokenizer)


def _gemma3(tokenizer: Any) -> Any:
    return hf.Gemma3Processor(hf.Gemma3ImageProcessorPil(size=SQUARE), tokenizer, image_seq_length=4)


def _got_ocr2(tokenizer: Any) -> Any:
    return hf.GotOcr2Processor(_tiles({}, 128), tokenizer)


QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
GLM = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
GEMMA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
AYA = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>")
PLAIN = {"<image>": IMAGE}
AROUND = {"<img>": START, "</img>": END}
OF_IMAGE = {"image_token": "<image>"}
PALIGEMMA = Tiny(_paligemma, "<image>", PLAIN, OF_IMAGE, "")

TINY: dict[str, Tiny] = {
    "llava": Tiny(_clip, "<image>", PLAIN, OF_IMAGE),
    "llava_pixtral": _pixtral(1),
    "mistral3": _pixtral(2),
    "llava_next": Tiny(_llava_next, "<image>", PLAIN, OF_IMAGE),
    "llava_onevision": Tiny(
        _llava_onevision, "<image>", {**PLAIN, "<video>": VIDEO}, {**OF_IMAGE, "video_token": "<video>"}
    ),
    "idefics3": _splits(hf.Idefics3Processor, hf.Idefics3ImageProcessorPil),
    "smolvlm": _splits(processor_class("SmolVLMProcessor"), hf.SmolVLMImageProcessorPil, video_processor=None),
    "qwen2_vl": _patches(processor_class("Qwen2VLProcessor"), hf.Qwen2VLImageProcessorPil, QWEN),
    "qwen2_5_vl": _patches(processor_class("Qwen2_5_VLProcessor"), hf.Qwen2VLImageProcessorPil, QWEN),
    "qwen3_vl": _patches(processor_class("Qwen3VLProcessor"), hf.Qwen2VLImageProcessorPil, QWEN, 16),
    "glm4v": _patches(processor_class("Glm4vProcessor"), hf.Glm4vImageProcessorPil, GLM),
    "internvl": Tiny(_internvl, "<IMG_CONTEXT>", {"<IMG_CONTEXT>": IMAGE, "<video>": VIDEO, **AROUND}, INTERN),
    "got_ocr2": Tiny(_got_ocr2, "<img><imgpad></img>", {"<imgpad>": IMAGE, **AROUND}, {}, ""),
    "aya_vision": Tiny(_aya, "<image>", {"<|IMG_PATCH|>": IMAGE, **dict.fromkeys(AYA)}, {}),
    "paligemma": PALIGEMMA,
    "paligemma2": PALIGEMMA,
    "gemma3": Tiny(_gemma3, "<start_of_image>", dict(zip(GEMMA.values(), (IMAGE, START, END), strict=True)), GEMMA),
}


def make(name: str) -> Any:
    """A family's processor."""
    tiny = TINY[name]
    words = ["<pad>", "<s>", "</s>", "<unk>", TURN, "\n", "\n\n", "\n\n\n", *WORDS, *TILES]
    ids = {word: number for number, word in enumerate(words)}
    free = iter(sorted({*range(len(words), TEXT["vocab_size"])} - {*tiny.tokens.values()} - {IMAGE}))
    ids |= {word: next(free) if number is None else number for word, number in tiny.tokens.items()}
    ids |= {f"w{number}": number for number in free}  # what a model with random weights says
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|\w+|[^\w\s]"), "removed", invert=True)
    special = ["<pad>", "<s>", "</s>", "<unk>", TURN, *tiny.tokens]
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=tiny.named,
        clean_up_tokenization_spaces=False,
    )
    processor = tiny.processor(tokenizer)
    processor.chat_template = tiny.begin + (
        "{% for m in messages %}" + TURN + "{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        + tiny.placeholder + "{% elif c['type'] == 'video' %}" + tiny.video + "{% else %}{{ c['text'] }}{% endif %}"
        "{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}" + TURN + "assistant\n{% endif %}"
    )  # fmt: skip
    return processor


def save(name: str, folder: Path) -> Path:
    """Write a family's processor into a checkpoint's folder."""
    make(name).save_pretrained(folder)
    return folder
