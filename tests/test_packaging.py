"""The package as it is installed, and the scripts that make an environment for it."""

from __future__ import annotations

import configparser
import fcntl
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("scripts/tune", "scripts/test", "scripts/matrix", ".ci/run")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def test_dependencies_have_lower_bounds_only(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [line for extra in extras.values() for line in extra]
    for requirement in map(Requirement, lines):
        assert [spec.operator for spec in requirement.specifier] == [">="], str(requirement)
        assert requirement.url is None


def test_torch_and_triton_are_asked_for_once_and_loosely(project: dict[str, Any]) -> None:
    names = [Requirement(line).name for line in project["dependencies"]]
    assert names.count("torch") == names.count("triton") == 1
    for extra in project["optional-dependencies"].values():
        assert not {"torch", "triton"} & {Requirement(line).name for line in extra}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the project, as anybody would, from a copy of its checkout."""
    source = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--target", str(target), str(source)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return target


def test_install_brings_every_file(installed: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(folder)) for path in found}

    assert "py.typed" in files(installed / "sm120tune")
    assert files(installed / "sm120tune") == files(ROOT / "src" / "sm120tune")


def test_install_brings_the_console_script(installed: Path) -> None:
    (entry_points,) = installed.glob("sm120tune-*.dist-info/entry_points.txt")
    parser = configparser.ConfigParser()
    parser.read(entry_points)
    assert parser["console_scripts"]["sm120tune"] == "sm120tune.__main__:main"
    assert os.access(installed / "bin" / "sm120tune", os.X_OK)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_executable(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert (ROOT / name).read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize("name", [*COMMANDS, "scripts/_env.sh"])
def test_bash_can_parse(name: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


# A Python that makes empty environments, only notes what pip is asked for, and only says what it would run.
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *_base_executable*) echo "$0" ;;
    *"_probe.py fits"*) if [[ $0 == */.venv* ]]; then echo complete; else echo "${{STUB_FITS:-bare}}"; fi ;;
    *"-m venv "*)
        mkdir -p "${{@: -1}}/bin" "${{@: -1}}/lib/python3.11/site-packages"
        cp "$0" "${{@: -1}}/bin/python"
        echo "venv" >>"$STUB_LOG" ;;
    *"-m pip "*)
        all=$*
        all=${{all#*--disable-pip-version-check }}
        echo "${{all/ --no-warn-conflicts/}}" >>"$STUB_LOG"
        sleep "${{STUB_SLEEP:-0}}"
        if [[ -n ${{STUB_FAIL:-}} && $* == *$STUB_FAIL* ]]; then echo "no way" >&2; exit 1; fi ;;
    "-m sm120tune"* | "-m pytest"*) echo "$0 $*" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


class Checkout:
    """A copy of the scripts with a Python that does not install anything."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "log"
        self.stub("python3", PYTHON)
        self.stub("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def stub(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text, encoding="utf-8")
        (self.bin / name).chmod(0o755)

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SM120TUNE", "PYTHON"))}
        inherited |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "STUB_LOG": str(self.log), **env}
        return subprocess.Popen(
            ["bash", str(self.root / command[0]), *command[1:]],
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*command, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def asked(self) -> list[str]:
        """Tell what was made and installed since the last call."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_first_use_makes_an_environment_and_the_second_keeps_it(checkout: Checkout) -> None:
    ran = f"{checkout.root}/.venv/bin/python -m sm120tune --experts 8 --note a b\n"
    code, out, err = checkout.run("scripts/tune", "--experts", "8", "--note", "a b")
    assert (code, out) == (0, ran), err
    asked = checkout.asked()
    assert asked[0] == "venv"
    assert "https://download.pytorch.org/whl/cpu" in asked[1]
    assert asked[1].endswith("torch==2.13.0")
    assert asked[2].startswith("install torch==2.13.0 numpy>=")
    assert asked[3:] == [
        "install --no-deps triton==3.8.0",
        "install --no-deps --only-binary=sglang sglang==0.5.23",
        f"install --no-deps --editable {checkout.root}",
    ]
    assert checkout.run("scripts/tune", "--experts", "8", "--note", "a b") == (0, ran, "")
    assert checkout.asked() == []


def test_with_a_gpu_torch_brings_its_triton(checkout: Checkout) -> None:
    checkout.stub("nvidia-smi", "#!/bin/sh\necho 'GPU 0: Some (UUID: GPU-0)'\n")
    assert checkout.run("scripts/tune")[0] == 0
    asked = checkout.asked()
    assert asked[1].startswith("install torch==2.14.1 numpy>=")
    assert not [line for line in asked if "pytorch.org" in line or "triton" in line]
    checkout.stub("nvidia-smi", "#!/bin/sh\nexit 9\n")  # out of sight for once
    assert checkout.run("scripts/tune")[0] == 0
    assert checkout.asked() == []


def test_without_pytorch_s_own_index_the_ordinary_one_serves(checkout: Checkout) -> None:
    code, _, err = checkout.run("scripts/tune", STUB_FAIL="--index-url")
    assert code == 0
    assert "CPU index can't be reached" in err
    assert "no way" not in err


def test_a_failed_installation_is_told_and_done_again(checkout: Checkout) -> None:
    code, out, err = checkout.run("scripts/tune", STUB_FAIL="triton==3.8.0")
    assert (code, out) == (2, "")
    assert err.splitlines()[-2:] == [
        "no way",
        "sm120tune: could not be installed (see above): pip install --no-deps triton==3.8.0",
    ]
    checkout.asked()
    assert checkout.run("scripts/tune")[0] == 0
    assert checkout.asked()[0] == "venv"


def test_sglang_s_wheel_for_another_python_will_do(checkout: Checkout) -> None:
    assert checkout.run("scripts/tune", STUB_FAIL="--only-binary=sglang")[0] == 0
    assert [line for line in checkout.asked() if "--python-version 3.12" in line and "--target" in line]


def test_other_requirements_make_it_anew(checkout: Checkout) -> None:
    chosen = {"SM120TUNE_TORCH": "torch==2.11.0", "SM120TUNE_TRITON": "triton==3.6.0"}
    assert checkout.run("scripts/tune")[0] == 0
    checkout.asked()
    assert checkout.run("scripts/tune", STUB_FITS="complete", **chosen)[0] == 0
    asked = checkout.asked()
    assert asked[0] == "venv"
    assert "install --no-deps triton==3.6.0" in asked
    assert checkout.run("scripts/tune", **chosen)[0] == 0
    assert checkout.asked() == []


def test_nothing_is_taken_away_under_a_run(checkout: Checkout) -> None:
    assert checkout.run("scripts/tune")[0] == 0
    with open(checkout.root / ".venv-locks" / ".venv.use") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert checkout.run("scripts/tune")[0] == 0
        code, _, err = checkout.run("scripts/tune", SM120TUNE_TORCH="torch==2.11.0")
        assert code == 2
        assert err == "sm120tune: .venv has to be made anew, but a run is using it: wait for its end\n"
    assert checkout.run("scripts/tune", SM120TUNE_TORCH="torch==2.11.0")[0] == 0


def test_two_first_uses_make_one_environment(checkout: Checkout) -> None:
    runs = [checkout.start("scripts/tune", str(number), STUB_SLEEP="0.2") for number in range(3)]
    for number, run in enumerate(runs):
        out, err = run.communicate(timeout=60)
        assert (run.returncode, out) == (0, f"{checkout.root}/.venv/bin/python -m sm120tune {number}\n"), err
    assert checkout.asked().count("venv") == 1


def test_test_tools_are_added_to_the_same_environment(checkout: Checkout) -> None:
    assert checkout.run("scripts/tune")[0] == 0
    checkout.asked()
    assert checkout.run("scripts/test", STUB_FAIL="pytest")[0] == 2
    checkout.asked()
    assert checkout.run("scripts/tune")[0] == 0
    assert checkout.asked() == []
    code, out, _ = checkout.run("scripts/test", "-k", "x")
    assert (code, out) == (0, f"{checkout.root}/.venv/bin/python -m pytest -k x\n")
    (asked,) = checkout.asked()
    assert "pytest>=" in asked
    assert "mypy>=" in asked
    assert checkout.run("scripts/test")[0] == checkout.run("scripts/tune")[0] == 0
    assert checkout.asked() == []


def test_a_python_with_everything_is_used_as_it_is(checkout: Checkout) -> None:
    code, out, err = checkout.run("scripts/tune", "x", STUB_FITS="complete")
    assert (code, out, err) == (0, f"{checkout.bin}/python3 -m sm120tune x\n", "")
    assert checkout.asked() == []
    assert not list(checkout.root.glob(".venv*"))


def test_small_packages_go_on_top_of_a_python_with_sglang(checkout: Checkout) -> None:
    code, out, _ = checkout.run("scripts/tune", "x", STUB_FITS="parent")
    assert (code, out) == (0, f"{checkout.root}/.venv-overlay/bin/python -m sm120tune x\n")
    asked = checkout.asked()
    assert asked[0] == "venv"
    assert asked[1].startswith("install numpy>=")
    assert asked[2:] == [f"install --no-deps --editable {checkout.root}"]
    assert list(checkout.root.glob(".venv-overlay/lib/python*/site-packages/parent.pth"))


def test_an_old_python_is_refused_in_one_line(checkout: Checkout) -> None:
    for name in ("python", "python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        checkout.stub(name, '#!/bin/sh\ncase "$*" in *version_info*) exit 1 ;; *) echo 3.10.12 ;; esac\n')
    code, out, err = checkout.run("scripts/tune", "x")
    assert (code, out) == (2, "")
    assert err == (
        "sm120tune: Python 3.11 or newer is needed, and python3 here is 3.10.12: put a newer one first in PATH\n"
    )


@pytest.mark.parametrize(
    ("flags", "missing", "answer"),
    [
        ((), "sglang", "bare"),
        (("no-sglang",), "sglang", "complete"),
        ((), "", "complete"),
        ((), "optuna", "parent"),
        ((), "torch", "bare"),
    ],
)
def test_probe_tells_what_a_python_lacks(tmp_path: Path, flags: tuple[str, ...], missing: str, answer: str) -> None:
    lines = ["torch>=2.8", "triton>=3.5", "optuna>=4.0"]
    pyproject = f"[project]\ndependencies = {lines}\n[project.optional-dependencies]\ndev = []\n"
    (tmp_path / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    packages = tmp_path / "packages"
    for name in {"torch", "triton", "optuna", "sglang"} - {missing}:
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
        (packages / f"{name}-9.0.dist-info").mkdir()
        (packages / f"{name}-9.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 9.0\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "scripts" / "_probe.py"), "fits", str(tmp_path), *flags],
        env={"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{answer}\n"


def test_probe_counts_an_old_package_as_missing() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import _probe
    finally:
        sys.path.pop(0)
    assert _probe.present("packaging", "packaging>=20.0")
    assert not _probe.present("packaging", "packaging>=9999.1")
    assert not _probe.present("no_such_package", "no_such_package>=1")
    assert _probe.numbers("2.14.1+cu130") == [2, 14, 1]
