"""Write the model as a standard Hugging Face checkpoint, and read it back."""

import copy
import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from demo_vlm.vocabulary import BOS, CHAT_TEMPLATE, EOS, IMAGE_SIZE, PAD, PATCH, SPECIAL, TOKEN_IDS
from engines.errors import UserError


def build_processor(image_size: int = IMAGE_SIZE, patch: int = PATCH) -> LlavaProcessor:
    """Image processor (Pillow, no torchvision), word-level tokenizer and chat template; sizes are in pixels."""
    words = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    words.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=1024,
        extra_special_tokens={"image_token": "<image>"},
        clean_up_tokenization_spaces=False,
    )
    size = {"height": image_size, "width": image_size}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=patch,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
    )


def save_checkpoint(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write processor, tokenizer, chat template and bfloat16 weights into `folder`, readable by all."""
    folder.mkdir(parents=True, exist_ok=True)
    build_processor().save_pretrained(folder)
    half = copy.deepcopy(model).bfloat16()
    half.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, max_new_tokens=8, do_sample=False
    )
    half.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600


def load_checkpoint(folder: Path) -> LlavaForConditionalGeneration:
    """The model of a checkpoint folder in float32, ready to evaluate."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no checkpoint: python scripts/train_demo_vlm.py --out {folder}")
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def replace_files(new: Path, folder: Path) -> None:
    """Move every file of `new` into `folder`, each in one step, and remove `new`; other files there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(new.iterdir()):
        path.replace(folder / path.name)
    shutil.rmtree(new)
