"""How long a prompt is, and the bucket that it needs."""

from __future__ import annotations

from engines.errors import UserError
from engines.layout import Layout
from export.checkpoint import Checkpoint
from export.graphs import State
from export.recipe import Recipe
from export.stages.perception import Attention

ROUND = 16  # bucket lengths are multiples of this


def text_tokens(
    checkpoint: Checkpoint, images: int, question: int, turns: int = 1, answer: int = 0, layout: Layout | None = None
) -> int:
    """Text tokens of a chat: what is written around and in its images, its questions, and the answers between them.

    Args:
        images: all in the first turn; none if the model takes none.
        question, answer: tokens of each.
        layout: of the images; by default the first.
    """
    layout = layout or next(iter(checkpoint.layouts), None)
    images = images if layout else 0
    said = [{"type": "text", "text": ""}]
    first = {"role": "user", "content": [*[{"type": "image"}] * images, *said]}
    later = [{"role": "assistant", "content": said}, {"role": "user", "content": said}]
    processor, messages = checkpoint.processor, [first, *later * (turns - 1)]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    if layout:
        text = text.replace(checkpoint.placeholder, layout.text)
    template = processor.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    visual = images * layout.tokens if layout else 0
    return len(template) - visual + turns * question + (turns - 1) * answer


def bucket_length(checkpoint: Checkpoint, recipe: Recipe, images: int, text: int, layout: Layout | None = None) -> int:
    """Rows of the bucket for a prompt of so many images, pruned as the recipe wants it, and text tokens.

    Args:
        layout: of the images; by default the first.

    Raises:
        UserError: shortened inside the model, the prompt has no room for its text.
    """
    perception = recipe.perception
    each = layout.tokens if layout else checkpoint.image_tokens
    tokens = text + images * perception.count(each, perception.quota)
    length = -(-tokens // ROUND) * ROUND
    short = State(checkpoint.decoder, recipe, length).shortened
    if short and not short.fits(tokens, text):
        raise UserError(
            f"recipe {recipe.name}: a prompt of {images} image{'s' * (images > 1)} has {text} text tokens, and "
            f"shortened to {short.tokens} it has room for {short.text}: shorten it less, or give fewer of them"
        )
    return length


def check_sizes(recipe: Recipe, checkpoint: Checkpoint, lengths: list[int]) -> None:
    """Refuse what a build could not make, or would fill the memory with: more slots than the model has positions.

    Raises:
        UserError: that, or perception reads a layer that the model does not have.
    """
    limit = checkpoint.max_positions(recipe.positions.scale)
    perception, layers = recipe.perception, checkpoint.decoder.num_layers
    if isinstance(perception, Attention) and max(perception.layers, default=0) >= layers:
        raise UserError(
            f"recipe {recipe.name}: perception reads layer {max(perception.layers)} of the decoder, and the model has "
            f"layers 0 to {layers - 1}"
        )
    for state in (State(checkpoint.decoder, recipe, length) for length in lengths):
        if (slots := max(*state.capacities, state.window)) > limit:
            raise UserError(
                f"recipe {recipe.name}: {slots} slots in a layer for prompts of {state.length} tokens, and the model "
                f"has {limit} positions: lower keep, kv_bytes or least"
            )
