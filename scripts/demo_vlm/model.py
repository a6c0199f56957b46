"""The model (LLaVA architecture, 5.95 M parameters) and the packed forward pass that trains it.

A training sequence is one prompt's images followed by many independent question/answer segments. Every segment sees the
images and itself only, so the visual prefix, by far the longest part, is computed once for all of them:

    prefix                        question 1            question 2
    <s> user : image 1 : 64 x     what ... : red        is there ... : no
    positions 0 .. P-1            P, P+1, ...           P, P+1, ...

`forward` runs the Hugging Face modules' own weights, but projects q, k, v (and gate, up) in one product each, lets the
prefix attend within itself and the questions to everything, and spends the last layer on question rows only.
A test holds it to the model's own forward and generate().
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from demo_vlm.data import Context, Pixels
from demo_vlm.vocabulary import (
    BOS,
    EOS,
    IMAGE,
    IMAGE_SIZE,
    IMAGE_TOKENS,
    PAD,
    PATCH,
    VOCABULARY,
    encode,
    prefix_ids,
    question_ids,
)

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
IGNORE = -100
BLOCKED = -1e4  # finite, so that a padded row stays a number
GUIDED_LAYER, GUIDED_HEADS = 3, 4  # where training shows half of the heads which patches a question is about
AUX_LAYER = 2  # the auxiliary head reads the hidden states that enter this decoder layer


def build_model(seed: int) -> LlavaForConditionalGeneration:
    """A fresh model; everything is drawn from `seed`."""
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
        projection_dim=192,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    config.pad_token_id = PAD
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    _init(model)
    return model


@torch.no_grad()
def _init(model: nn.Module) -> None:
    """Normal init by fan-in: CLIP's own is too small for a tower that starts from nothing."""
    for name, p in model.named_parameters():
        if p.ndim == 2 and "embed" not in name:
            p.normal_(std=0.7 / math.sqrt(p.shape[1]))
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")):
                p.mul_(0.5)
            elif name.endswith("multi_modal_projector.linear_2.weight"):
                p.mul_(0.3)  # visual tokens about as large as words
        elif "patch_embedding" in name:
            p.normal_(std=1 / math.sqrt(p[0].numel()))
        elif "position_embedding" in name:
            p.normal_(std=0.3)
        elif "embed_tokens" in name:
            p.normal_(std=0.5)


@dataclass(frozen=True)
class Batch:
    """Contexts with the same number of images, as tensors. B contexts, T tokens of which the first `prefix` are shared.

    Attributes:
        pixels: normalised images, [B * images, 3, 64, 64].
        ids, positions: [B, T].
        segment: 0 in the prefix, 1, 2, ... in the questions, -1 in padding, [B, T].
        labels: the next token where it belongs to an answer, IGNORE elsewhere, [B, T].
        mask: added to the scores of the question rows, 0 or BLOCKED, [B, 1, T - prefix, T].
        target: where in the prefix the patches lie that an answer token must be read from, bool [N, T] for the N answer
            tokens in row order.
        images, prefix: images of every context, length of the prefix.
    """

    pixels: Tensor
    ids: Tensor
    positions: Tensor
    segment: Tensor
    labels: Tensor
    mask: Tensor
    target: Tensor
    images: int
    prefix: int


def normalise(images: Sequence[Pixels]) -> Tensor:
    """uint8 [64, 64, 3] each -> float32 [n, 3, 64, 64], as the saved image processor does it."""
    pixels = np.stack(images).astype(np.float32) / 255
    return torch.from_numpy(np.ascontiguousarray(((pixels - MEAN) / STD).transpose(0, 3, 1, 2)))


def patches_asked(question: str) -> tuple[int, list[int]]:
    """The image (from 0) and its patches that a question is about: a number's 2 x 4 patches, or the whole image."""
    image = re.match(r"in image (\d) ,", question)
    cell = re.search(r"number in row (\d) column (\d)", question)
    patches = list(range(IMAGE_TOKENS))
    if cell:
        row, column = int(cell[1]) - 1, int(cell[2]) - 1
        patches = [8 * (2 * row + i) + 4 * column + j for i in range(2) for j in range(4)]
    return int(image[1]) - 1 if image else 0, patches


def collate(contexts: Sequence[Context]) -> Batch:
    """Pack contexts; every one must have the same number of images."""
    images = len(contexts[0].images)
    head = prefix_ids(images)
    prefix = len(head)
    first = [i for i, token in enumerate(head) if token == IMAGE][::IMAGE_TOKENS]
    rows = []
    wanted: list[list[int]] = []
    for context in contexts:
        ids, segment, positions, labels = list(head), [0] * prefix, list(range(prefix)), [IGNORE] * prefix
        for s, question in enumerate(context.questions, 1):
            asked, answer = question_ids(question.text), [*encode(question.answer), EOS]
            tokens = asked + answer[:-1]
            ids += tokens
            segment += [s] * len(tokens)
            positions += range(prefix, prefix + len(tokens))
            labels += [IGNORE] * (len(asked) - 1) + answer
            image, patches = patches_asked(question.text)
            wanted += [[first[image] + patch for patch in patches]] * len(answer)
        rows.append((ids, segment, positions, labels))
    length = max(len(row[0]) for row in rows)
    padded = [
        torch.tensor([row[i] + [fill] * (length - len(row[i])) for row in rows])
        for i, fill in enumerate((PAD, -1, 0, IGNORE))
    ]
    ids_, segment_, positions_, labels_ = padded
    asking = segment_[:, prefix:]
    index = torch.arange(length)
    causal = index[None, prefix:, None] >= index[None, None, :]
    seen = ((asking[:, :, None] == segment_[:, None, :]) | (segment_[:, None, :] == 0)) & causal
    mask = torch.zeros(seen.shape).masked_fill(~seen, BLOCKED)[:, None]
    target = torch.zeros(len(wanted), length, dtype=torch.bool)
    for row, places in zip(target, wanted, strict=True):
        row[places] = True
    pixels = normalise([image for context in contexts for image in context.images])
    return Batch(pixels, ids_, positions_, segment_, labels_, mask, target, images, prefix)


def vision_features(tower: Any, pixels: Tensor) -> Tensor:
    """The tower's patch features, [n, 64, 192]: the last hidden states without the class token."""
    h = tower.pre_layrnorm(tower.embeddings(pixels))
    for layer in tower.encoder.layers:
        a = layer.self_attn
        x = layer.layer_norm1(h)
        weight = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        bias = torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias])
        q, k, v = F.linear(x, weight, bias).view(*x.shape[:2], 3, a.num_heads, -1).permute(2, 0, 3, 1, 4)
        h = h + a.out_proj(_attend(q, k, v, None))
        h = h + layer.mlp(layer.layer_norm2(h))
    return h[:, 1:]


def _weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Attention weights, [B, H, Q, D] x [B, H, S, D] -> [B, H, Q, S]."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3))
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Plain attention -> [B, Q, H * D]; its backward on CPU beats scaled_dot_product_attention's at these lengths."""
    return torch.matmul(_weights(q, k, mask), v).transpose(1, 2).flatten(2)


def _rms(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, H, T, D] by cos, sin [B, 1, T, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@dataclass(frozen=True)
class Output:
    """What the packed pass gives.

    Attributes:
        logits: at the N answer tokens in row order, [N, vocabulary].
        labels: the tokens due there, [N].
        seen: the visual tokens' hidden states before layer AUX_LAYER, [B * images, 64, 256].
        looked: share of attention that the answer tokens give to the patches they are about, in layer GUIDED_LAYER's
            first GUIDED_HEADS heads, [N, GUIDED_HEADS].
    """

    logits: Tensor
    labels: Tensor
    seen: Tensor
    looked: Tensor


def forward(model: LlavaForConditionalGeneration, batch: Batch, train_vision: bool = True) -> Output:
    """The packed forward pass.

    Args:
        model: the LLaVA model; its own weights are used.
        batch: packed contexts.
        train_vision: whether gradients flow into the vision tower.
    """
    lm = model.model.language_model
    with torch.set_grad_enabled(train_vision and torch.is_grad_enabled()):
        features = vision_features(model.model.vision_tower, batch.pixels)
    features = model.model.multi_modal_projector(features)
    visual = batch.ids == IMAGE
    h = lm.embed_tokens(batch.ids).masked_scatter(visual[..., None], features)
    cos, sin = lm.rotary_emb(h, position_ids=batch.positions)
    cos, sin = cos[:, None], sin[:, None]
    p = batch.prefix
    causal = torch.full((p, p), BLOCKED).triu(1)
    labels = batch.labels[:, p:]
    chosen = labels != IGNORE
    seen = looked = h
    for i, layer in enumerate(lm.layers):
        if i == AUX_LAYER:
            seen = h[visual].view(-1, IMAGE_TOKENS, h.shape[-1])
        a = layer.self_attn
        x = _rms(h, layer.input_layernorm)
        weight = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        q, k, v = F.linear(x, weight).view(*x.shape[:2], 3, -1, a.head_dim).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        weights = _weights(q[:, :, p:], k, batch.mask)
        if i == GUIDED_LAYER:
            answering = weights[:, :GUIDED_HEADS].transpose(1, 2)[chosen]
            looked = (answering * batch.target[:, None]).sum(-1)
        asked = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        if i + 1 < len(lm.layers):
            context = _attend(q[:, :, :p], k[:, :, :p], v[:, :, :p], causal)
            asked = torch.cat([context, asked], 1)
        else:
            h = h[:, p:]
        h = h + a.o_proj(asked)
        x = _rms(h, layer.post_attention_layernorm)
        gate, up = F.linear(x, torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])).chunk(2, -1)
        h = h + layer.mlp.down_proj(F.silu(gate) * up)
    return Output(model.lm_head(_rms(h[chosen], lm.norm)), labels[chosen], seen, looked)


def exact_matches(logits: Tensor, batch: Batch) -> list[list[bool]]:
    """Per context and question: are all answer tokens the argmax? (Teacher-forced, which equals greedy exact match.)"""
    labels, segment = batch.labels[:, batch.prefix :], batch.segment[:, batch.prefix :]
    chosen = labels != IGNORE
    wrong = torch.zeros_like(chosen)
    wrong[chosen] = logits.argmax(-1) != labels[chosen]
    return [
        [not bool(w[s == k].any()) for k in range(1, int(s.max()) + 1)] for w, s in zip(wrong, segment, strict=True)
    ]
