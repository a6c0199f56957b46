"""Ask a bundle questions of the easy-VQA test split, about one image and about four; answers beside the truth.

python scripts/ask_easy_vqa.py build/demo-vlm
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import runtime
from engines.errors import Parser, UserError, command


@dataclass(frozen=True)
class Question:
    """A question about one image or about one of several, and what the data set says."""

    images: list[str]
    text: str
    truth: str


def questions(count: int, images: int) -> Iterator[Question]:
    """`count` questions spread evenly over the test split, each with `images` images of it.

    With several images the question names one of them, and the others are the images that follow it in the data set.
    """
    try:
        import easy_vqa
    except ImportError:
        raise UserError("easy-VQA is not installed: pip install easy-vqa") from None
    texts, truths, owners = easy_vqa.get_test_questions()
    paths = easy_vqa.get_test_image_paths()
    for n in range(count):
        index = (2 * n + 1) * len(texts) // (2 * count)
        asked = n % images
        shown = [paths[(owners[index] - asked + k) % len(paths)] for k in range(images)]
        prefix = f"in image {asked + 1} , " if images > 1 else ""
        yield Question(shown, prefix + texts[index], truths[index])


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="folder that export/build.py wrote for the demo VLM")
    parser.add_argument("--level", help="compression level; default: the bundle's")
    parser.add_argument("--count", type=int, default=5, metavar="N", help="questions of each kind; default: 5")
    arguments = parser.parse_args(argv)

    vlm = runtime.open(arguments.bundle, level=arguments.level)
    asked = [*questions(arguments.count, images=1), *questions(arguments.count, images=4)]
    correct = 0
    print(f"{'images':6}  {'question':50}  {'answer':16}  {'truth':10}  KV KiB of fp16 KiB")
    for question in asked:
        result = vlm.generate(question.text, images=question.images)
        right = result.text.strip().lower() == question.truth
        correct += right
        kib, of_kib = result.stats.kv_bytes / 1024, result.stats.kv_bytes_uncompressed / 1024
        print(
            f"{len(question.images):6}  {question.text:50}  {result.text:16}  {question.truth:10}  "
            f"{kib:6.0f} of {of_kib:8.0f}{'' if right else '  wrong'}"
        )
    print(f"level {vlm.level}: {correct} of {len(asked)} right")


if __name__ == "__main__":
    sys.exit(main())
