"""The page in a browser: a person asks, and sees what the compression did. Nothing but its own server is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import easy_vqa
import numpy as np
import pytest

from engines.bundle import Bundle
from runtime.model import VLM
from runtime.server.answers import Answer
from runtime.server.levels import Levels
from tests import browser
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, png, serving

QUESTION = "what is it"
SCREENS = [(1280, "light"), (390, "dark")]


class Page:
    """The page in Chromium, and what a person does with it."""

    def __init__(self, chromium: Any, served: Served, folder: Path, width: int = 1280, scheme: str = "light") -> None:
        self.chromium, self.served, self._folder = chromium, served, folder
        browser.screen(chromium, width, scheme)
        self.asked = browser.opened(chromium, f"{served.url}/")
        self.run = chromium.execute_script
        self.until(lambda: self.run("return document.getElementById('level').options.length"))

    def at(self, name: str) -> Any:
        return self.chromium.find_element("id", name)

    def texts(self, css: str) -> list[str]:
        return [each.text for each in self.chromium.find_elements("css selector", css)]

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + 30
        while not true():
            assert time.monotonic() < end, self.texts("body")
            time.sleep(0.02)

    def add(self, *images: bytes) -> None:
        paths = [self._folder / f"{number}.png" for number in range(len(images))]
        for path, data in zip(paths, images, strict=True):
            path.write_bytes(data)
        self.at("files").send_keys("\n".join(map(str, paths)))
        self.until(lambda: len(self.texts("#chosen li")) == len(images))

    def ask(self, question: str) -> None:
        self.at("question").send_keys(question + "\n")

    def answer(self) -> str:
        self.until(lambda: self.at("send").is_enabled() and not self.texts("#turns .busy"))
        return self.texts("#turns .assistant span")[-1]

    def alphas(self) -> np.ndarray:
        """Of every image's patches how dark they are, 0 to 255."""
        script = """
            return shown.map(({canvas, patches}) => patches.held.map((_, patch) => {
                const [left, top, wide, high] = patches.region;
                const x = left + (wide * (patch % patches.columns + 0.5)) / patches.columns;
                const y = top + (high * (Math.floor(patch / patches.columns) + 0.85)) / patches.rows;
                return canvas.getContext('2d').getImageData(x * canvas.width, y * canvas.height, 1, 1).data[3];
            }));
        """
        assert self.chromium.get_log("browser") == []
        dark = np.array(self.run(script))
        self.chromium.get_log("browser")  # advice to whoever reads pixels often
        return dark


@pytest.fixture
def page(chromium: Any, served: Served, tmp_path: Path) -> Iterator[Page]:
    yield Page(chromium, served, tmp_path)
    assert chromium.get_log("browser") == []


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_ask_and_see(chromium: Any, served: Served, tmp_path: Path, width: int, scheme: str) -> None:
    page = Page(chromium, served, tmp_path, width, scheme)
    assert all(url.startswith(served.url) for url in page.asked)
    page.add(png(image(1)), png(image(2)))
    page.ask(QUESTION)
    answer = page.answer()
    own = served.levels.open("tight").generate(QUESTION, [image(1), image(2)], 1024)
    assert answer == own.text
    assert page.at("question").get_attribute("value") == ""
    assert page.texts("#chosen li") == []

    stats = own.stats
    assert [page.at(name).text for name in ("full-bytes", "held-bytes")] == [
        f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"
        for count in (stats.kv_bytes_uncompressed, stats.kv_bytes)
    ]
    full, held = page.run("return ['full', 'held'].map(id => document.getElementById(id).clientWidth)")
    assert held / full == pytest.approx(stats.kv_bytes / stats.kv_bytes_uncompressed, rel=0.1)
    assert page.at("level-was").text == "tight: the default level"
    assert page.at("visual").text == "4 of 8 read"
    assert float(page.at("speed").text) > 0
    assert page.at("tokens").text == f"{stats.prompt_tokens} of prompt, {stats.generated_tokens} of answer"

    shares = np.array(stats.patches)
    assert page.alphas() == pytest.approx(255 * 0.88 * (1 - shares / shares.max()), abs=2)
    assert {0, 224} == {*page.alphas().flat} & {0, 224}  # some are clear and some are dropped
    assert f"8 patches, {(shares == 0).sum()} dropped" in page.at("patch").text
    page.at("veil").click()
    assert page.run("return getComputedStyle(document.querySelector('#pictures canvas')).opacity") == "0"

    assert page.run("return document.documentElement.scrollWidth") <= width
    paper, ink = (page.run(f"return getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color"))
    bright = [sum(map(int, color[4:-1].split(","))) for color in (paper, ink)]
    assert (bright[0] > bright[1] + 300) == (scheme == "light")
    assert chromium.get_log("browser") == []


def test_another_level_and_another_turn(page: Page) -> None:
    page.add(png(image(1)))
    page.ask(QUESTION)
    first = page.answer()
    page.run("document.getElementById('level').value = 'bundle:loose'; document.getElementById('level').onchange()")
    page.add(png(image(2)))
    page.ask("how many")
    picture, text = {"type": "image"}, "text"
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [picture, {"type": text, text: QUESTION}]},
        {"role": "assistant", "content": first},
        {"role": "user", "content": [picture, {"type": text, text: "how many"}]},
    ]
    assert page.answer() == page.served.levels.open("loose").generate(turns, [image(1), image(2)], 1024).text
    assert page.at("level-was").text == "loose: named in the request"
    assert len(page.texts("#pictures li")) == 2
    assert page.texts("#turns .user span") == [QUESTION, "how many"]
    page.at("new").click()
    assert page.texts("#turns li") == []
    assert not page.at("told").is_displayed()


def test_images_are_dropped_and_taken_back(page: Page) -> None:
    drop = """
        const data = new DataTransfer();
        for (const [name, type] of [['a.png', 'image/png'], ['b.txt', 'text/plain']])
            data.items.add(new File([new Uint8Array(arguments[0])], name, {type}));
        const dropped = new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true});
        document.getElementById('drop').dispatchEvent(dropped);
    """
    page.run(drop, list(png(image(1))))
    page.until(lambda: len(page.texts("#chosen li")) == 1)
    assert page.at("error").text == "b.txt is no image"
    assert page.run("return document.querySelector('#chosen img').naturalWidth") == 8
    page.chromium.find_element("css selector", "#chosen button").click()
    page.until(lambda: not page.texts("#chosen li"))


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping(page: Page, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """In the middle of an answer, which waits there however slow the browser is."""
    advance, whole = VLM.advance, page.served.levels.open("tight").generate(QUESTION, [image(1)], 1024).text
    tokens = threading.Semaphore(3)

    def held(*arguments: Any) -> Any:
        tokens.acquire(timeout=60)
        return advance(*arguments)

    monkeypatch.setattr(VLM, "advance", held)
    try:
        page.add(png(image(1)))
        page.ask(QUESTION)
        page.until(lambda: "".join(page.texts("#turns .assistant span")))
        if how == "button":
            page.at("stop").click()
        else:
            page.at("question").send_keys("\ue00c")
        said = page.answer()
    finally:
        tokens.release(1024)
    assert page.texts("#turns .assistant small") == ["stopped"]
    page.until(lambda: page.served.worker.here == 0)
    assert whole.startswith(said)
    assert said != whole


def test_a_mistake_is_told_and_the_question_stays(page: Page) -> None:
    question = "what " * 150
    page.at("question").send_keys(question)
    page.at("send").click()
    page.until(lambda: page.at("error").is_displayed())
    assert "only 120 positions" in page.at("error").text
    assert page.at("question").get_attribute("value") == question
    assert page.texts("#turns li") == []
    assert [entry["source"] for entry in page.chromium.get_log("browser")] == ["network"]  # of status 400
    page.at("question").clear()
    page.ask("what")
    assert page.answer()
    assert not page.at("error").is_displayed()


def test_an_answer_that_is_cut_off_is_said_once(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer, "end", lambda *_: b"")
    page.ask(QUESTION)
    page.answer()
    assert page.at("error").text == "the answer was cut off"
    assert page.run("return turns.map(({role}) => role)") == ["user", "assistant"]


def test_a_new_conversation_begins_with_nothing(page: Page) -> None:
    page.run("window.revoked = []; URL.revokeObjectURL = url => revoked.push(url)")
    page.add(png(image(1)))
    page.ask(QUESTION)
    page.answer()
    page.add(png(image(2)))
    page.at("new").click()
    assert page.texts("#chosen li, #pictures li") == []
    assert page.run("return [turns, chosen, shown].flat().length + blobs.size") == 0
    assert page.run("return revoked.length") == 2


def test_a_token_is_asked_for(chromium: Any, serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve(token="secret")
    browser.screen(chromium, 1280, "light")
    chromium.get(f"{served.url}/")
    at = lambda name: chromium.find_element("id", name)  # noqa: E731
    end = time.monotonic() + 20
    while not at("token").is_displayed():
        assert time.monotonic() < end
        time.sleep(0.02)
    at("token").send_keys("secret\t")
    while not at("level").text:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not at("error").is_displayed()
    chromium.get_log("browser")


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page: Page) -> None:
    page.add(png(image(1)))
    page.ask(QUESTION)
    page.answer()
    page.add(png(image(2)))
    nodes = page.chromium.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "textbox", "combobox", "checkbox", "img", "image", "form", "region"}
    named = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]]
    controls = [(role, name) for role, name in named if role in roles]
    assert len(controls) > 10
    assert [role for role, name in controls if not name] == []
    reached = []
    page.run("document.getElementById('level').focus()")
    for _ in range(12):
        reached.append(page.run("return document.activeElement.id || document.activeElement.tagName"))
        for kind in ("rawKeyDown", "keyUp"):
            page.chromium.execute_cdp_cmd(
                "Input.dispatchKeyEvent", {"type": kind, "key": "Tab", "windowsVirtualKeyCode": 9}
            )
    assert {"level", "new", "files", "question", "send", "later", "veil", "CANVAS", "BUTTON"} <= set(reached)


@pytest.mark.slow
def test_the_demo_model(chromium: Any, demo_bundle: Bundle, tmp_path: Path) -> None:
    """An image of easy-VQA, asked about at two levels."""
    picture = Path(easy_vqa.__file__).parent / "data" / "test" / "images" / "0.png"
    with serving(Levels(VLM(demo_bundle))) as served:
        page = Page(chromium, served, tmp_path)
        page.add(picture.read_bytes())
        page.ask("what is the color of the triangle?")
        assert page.answer() == "red"
        assert page.at("visual").text == "64 of 64 read"
        assert page.alphas().shape == (1, 64)
        assert len({*page.alphas().flat}) > 5
    assert chromium.get_log("browser") == []
