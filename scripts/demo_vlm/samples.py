"""Write the calibration prompts: 64 prompts of one, two, four and eight images from the training side.

    python -m demo_vlm.samples models/demo-vlm/samples          (run in scripts/)
    python -m demo_vlm.samples build/pages --pages              of four pages each, for what is to read pages
    python -m demo_vlm.samples build/tuning --times 3 --most 4  156 of up to four images, to choose recipes by

easy-VQA training images and fresh pages of a seed that neither training nor a held-out suite uses.
`samples.jsonl` holds one object a line, its images beside it:
{"images": ["a.png", ...], "prompt": ..., "answer": ..., "task": "easy" or "page"}.
"""

import argparse
import json
from pathlib import Path

from PIL import Image

from demo_vlm.data import Kind, Source, load_easy_vqa
from engines.errors import positive

SEED = 80_001
Contexts = tuple[tuple[int, dict[Kind, float], int, int], ...]
CONTEXTS: Contexts = (
    # images, tasks, questions, contexts
    (1, {"page": 1}, 2, 5),
    (1, {"easy": 1}, 1, 6),
    (2, {"easy": 1, "page": 1}, 4, 4),
    (4, {"page": 1}, 5, 2),
    (4, {"easy": 1, "page": 1}, 5, 2),
    (8, {"easy": 1, "page": 1}, 6, 2),
)
PAGES: Contexts = ((4, {"page": 1}, 2, 32),)


def write_samples(folder: Path, kinds: Contexts = CONTEXTS, times: int = 1) -> int:
    """Write the prompts and their images into `folder`, `times` as many of each kind; the number of prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Source(load_easy_vqa("train"), SEED)
    lines: list[str] = []
    drawn = 0
    for images, mix, questions, contexts in kinds:
        for _ in range(contexts * times):
            context = source.context(images, mix, questions)
            names = [f"{drawn + k:03}.png" for k in range(images)]
            for name, pixels in zip(names, context.images, strict=True):
                Image.fromarray(pixels).save(folder / name, optimize=True)
            drawn += images
            for question in context.questions:
                line = {"images": names, "prompt": question.text, "answer": question.answer, "task": question.kind}
                lines.append(json.dumps(line))
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write, e.g. models/demo-vlm/samples")
    parser.add_argument("--pages", action="store_true", help="64 prompts of four pages")
    parser.add_argument("--times", type=positive, default=1, metavar="N", help="as many prompts (default: 1)")
    parser.add_argument("--most", type=positive, default=8, metavar="N", help="images of a prompt (default: 8)")
    arguments = parser.parse_args()
    kinds = tuple(kind for kind in (PAGES if arguments.pages else CONTEXTS) if kind[0] <= arguments.most)
    print(f"{write_samples(arguments.folder, kinds, arguments.times)} prompts")


if __name__ == "__main__":
    main()
