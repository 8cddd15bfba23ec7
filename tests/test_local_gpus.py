from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sm120tune
from sm120tune import _nvidia_smi
from sm120tune.devices import (
    LocalGPU,
    busy_reason,
    find_device,
    local_gpus,
)
from sm120tune.errors import UserError

# The GPUs of this machine. The real torch is asked first; what needs a GPU that is not here uses a stand-in torch
# that the child imports, so that everything around it (child, environment, nvidia-smi, parsing) is the real thing.


def test_the_calling_process_stays_without_torch() -> None:
    code = (
        "import sys; from sm120tune.devices import local_gpus; print(len(local_gpus())); "
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sm120tune.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


TORCH = """
import sys
print("a library's chatter on standard output")


class Properties:
    def __init__(self, **values):
        self.__dict__.update(values)


class version:
    cuda = "13.0"


CARDS = {cards}


class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: len(CARDS))
    get_device_properties = staticmethod(lambda index: Properties(**CARDS[index][0]))

    @staticmethod
    def mem_get_info(index):
        if CARDS[index][1] is None:
            raise RuntimeError("CUDA error: out of memory")
        return CARDS[index][1]
"""

CARD: dict[str, Any] = {
    "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "uuid": "11111111-2222-3333-4444-555555555555",
    "major": 12,
    "minor": 0,
    "multi_processor_count": 187,
    "shared_memory_per_block_optin": 101376,
    "shared_memory_per_multiprocessor": 102400,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 1536,
    "L2_cache_size": 128 * 2**20,
    "total_memory": 100_000_000_000,
    "clock_rate": 2_000_000,
    "memory_clock_rate": 10_000_000,
    "memory_bus_width": 512,
    "is_integrated": 0,
}
IDLE = (99_000_000_000, 100_000_000_000)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the child import a torch made of the given text, with no nvidia-smi on PATH."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def use(text: str) -> None:
        (tmp_path / "torch.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return use


def cards(*pairs: tuple[dict[str, Any], tuple[int, int] | None]) -> str:
    return TORCH.replace("{cards}", repr(list(pairs)))


def nvidia_smi(folder: Path, gpus: str, apps: str, code: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"sys.stdout.write({apps!r} if 'compute-apps' in sys.argv[1] else {gpus!r})\nsys.exit({code})\n"
    )
    program.chmod(0o755)


def test_a_known_card_has_torchs_limits_and_the_tables_peaks(stand_in: Callable[[str], None]) -> None:
    stand_in(cards((CARD, IDLE)))
    (gpu,) = local_gpus()
    known = find_device(CARD["name"])
    assert gpu.spec.sm_count == 187
    assert gpu.spec.memory_bytes == 100_000_000_000
    assert (gpu.spec.bandwidth, gpu.spec.bf16_flops) == (known.bandwidth, known.bf16_flops)
    assert known.source in gpu.spec.source
    assert "torch" in gpu.spec.source
    assert gpu.spec.max_warps_per_sm == 48
    assert gpu.spec.capability == (12, 0)
    assert (gpu.index, gpu.visible_token, gpu.uuid) == (0, "0", "GPU-11111111-2222-3333-4444-555555555555")
    assert (gpu.free_bytes, gpu.total_bytes) == IDLE
    assert (gpu.driver, gpu.utilization, gpu.processes) == ("unknown", None, None)


def test_an_unknown_card_has_peaks_from_its_clocks(stand_in: Callable[[str], None]) -> None:
    stand_in(cards(({**CARD, "name": "NVIDIA RTX PRO 9000"}, IDLE)))
    (gpu,) = local_gpus()
    assert gpu.spec.bandwidth == pytest.approx(2 * 10e9 * 512 / 8)
    assert gpu.spec.bf16_flops == pytest.approx(187 * 1024 * 2e9)
    assert "derived: bandwidth" in gpu.spec.source
    assert "estimated: bf16" in gpu.spec.source


def test_a_torch_without_clocks_gives_an_estimate_that_says_so(stand_in: Callable[[str], None]) -> None:
    card = {key: value for key, value in CARD.items() if "clock" not in key and "bus" not in key}
    stand_in(cards(({**card, "name": "NVIDIA GeForce RTX 6090"}, IDLE)))
    (gpu,) = local_gpus()
    assert gpu.spec.bandwidth == pytest.approx(1.78e12, rel=0.01)
    # GeForce: half the rate.
    assert gpu.spec.bf16_flops == pytest.approx(187 * 512 * 2.4e9)
    assert "estimated: bandwidth" in gpu.spec.source


def test_clocks_that_no_card_has_count_as_none(stand_in: Callable[[str], None]) -> None:
    stand_in(cards(({**CARD, "name": "NVIDIA vGPU", "memory_clock_rate": 1, "clock_rate": 1}, IDLE)))
    (gpu,) = local_gpus()
    assert gpu.spec.bandwidth == pytest.approx(187 * 9.5e9)
    assert gpu.spec.bf16_flops == pytest.approx(187 * 1024 * 2.4e9)
    assert "estimated: bandwidth" in gpu.spec.source


def test_tokens_are_those_of_the_users_cuda_visible_devices(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(cards((CARD, IDLE), (CARD, IDLE)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert [(gpu.index, gpu.visible_token) for gpu in local_gpus()] == [(0, "3"), (1, "GPU-abc")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [gpu.visible_token for gpu in local_gpus()] == ["0", "1"]


def test_nvidia_smi_adds_driver_utilization_and_processes(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    second = {**CARD, "uuid": "GPU-second"}
    stand_in(cards((CARD, IDLE), (second, IDLE), ({**CARD, "uuid": "MIG-third"}, IDLE)))
    first = f"GPU-{CARD['uuid']}"
    nvidia_smi(
        tmp_path, f"GPU-second, 580.1, [N/A]\n{first}, 580.1, 37\n", f"{first}, 12\nGPU-second, 13\n{first}, 14\n"
    )
    readings = [(gpu.driver, gpu.utilization, gpu.processes) for gpu in local_gpus()]
    assert readings == [("580.1", 37, 2), ("580.1", None, 1), ("580.1", None, None)]


def test_a_failing_nvidia_smi_is_no_obstacle(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in(cards((CARD, IDLE)))
    nvidia_smi(tmp_path, "Failed to initialize NVML\n", "", code=9)
    (gpu,) = local_gpus()
    assert (gpu.driver, gpu.utilization, gpu.processes) == ("unknown", None, None)


def test_clocks_are_what_nvidia_smi_says_of_that_gpu(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    assert _nvidia_smi.clocks("GPU-a", 30) is None  # no nvidia-smi at all
    nvidia_smi(
        tmp_path, "GPU-a, 2422, 12481, 3090, [N/A], 310.52, 600.00, 61\nGPU-b, 180, 405, 3090, 14001, 9, 600, 30\n", ""
    )
    assert _nvidia_smi.clocks("GPU-a", 30) == {
        "sm_mhz": 2422.0,
        "memory_mhz": 12481.0,
        "max_sm_mhz": 3090.0,
        "power_w": 310.52,
        "power_limit_w": 600.0,
        "temperature_c": 61.0,
    }
    assert _nvidia_smi.clocks("MIG-c", 30) is None
    nvidia_smi(tmp_path, "GPU-a, 1, 2\n", "")
    assert _nvidia_smi.clocks("GPU-a", 30) is None
    nvidia_smi(tmp_path, "Failed\n", "", code=9)
    assert _nvidia_smi.clocks("GPU-a", 30) is None


def test_a_card_without_room_for_a_context_is_busy_and_no_crash(stand_in: Callable[[str], None]) -> None:
    stand_in(cards((CARD, None), (CARD, IDLE)))
    full, idle = local_gpus()
    assert (full.free_bytes, full.total_bytes) == (0, 100_000_000_000)
    assert "100% of its memory" in str(busy_reason(full))
    assert busy_reason(idle) is None


@pytest.mark.parametrize(
    "text",
    [
        "class version:\n    cuda = None\n",
        "class version:\n    cuda = '13.0'\nclass cuda:\n    is_available = staticmethod(lambda: False)\n",
    ],
)
def test_no_cuda_or_no_gpu_is_an_empty_tuple(stand_in: Callable[[str], None], text: str) -> None:
    stand_in(text)
    assert local_gpus() == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import sys; print('first', file=sys.stderr); raise ImportError('libcudart.so.13: cannot open')", "libcudart"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import sys; sys.exit(0)", "unreadable answer"),
        (cards(({**CARD, "L2_cache_size": 0}, IDLE)), "l2_bytes"),
    ],
)
def test_a_broken_torch_is_one_line_with_its_last_words(stand_in: Callable[[str], None], text: str, named: str) -> None:
    stand_in(text)
    with pytest.raises(UserError) as caught:
        local_gpus()
    assert named in str(caught.value)
    assert "first" not in str(caught.value)
    assert "--device" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_torch_that_hangs_is_given_up(stand_in: Callable[[str], None]) -> None:
    stand_in("import time; time.sleep(600)")
    with pytest.raises(UserError, match=r"within 0\.5 s"):
        local_gpus(timeout_s=0.5)


def test_what_torch_imports_is_not_shadowed(
    stand_in: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "torch.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(elsewhere)
    # Neither by the working directory nor by this package's own modules.
    stand_in("import importlib.util\nassert importlib.util.find_spec('tiles') is None\n" + cards((CARD, IDLE)))
    assert len(local_gpus()) == 1


@pytest.mark.parametrize(
    ("free", "utilization", "processes", "integrated", "words"),
    [
        (95, None, None, False, None),
        (91, 10, 3, False, None),
        (80, 0, 2, False, ["20% of its memory", "processes: 2"]),
        (80, 0, 0, False, ["20% of its memory"]),
        (95, 11, None, False, ["11 % utilized"]),
        (50, 90, 1, False, ["50% of its memory", "90 % utilized"]),
        (20, 0, 0, True, None),
        (20, 50, 1, True, ["50 % utilized"]),
    ],
)
def test_busy_reason(
    free: int, utilization: int | None, processes: int | None, integrated: bool, words: list[str] | None
) -> None:
    spec = find_device("NVIDIA GB10")
    gpu = LocalGPU(
        index=0, visible_token="7", uuid="GPU-x", spec=spec, driver="580", free_bytes=free, total_bytes=100,
        utilization=utilization, processes=processes, integrated=integrated,
    )  # fmt: skip
    reason = busy_reason(gpu)
    if words is None:
        assert reason is None
    else:
        assert reason is not None
        assert all(word in reason for word in ["GPU 7 (NVIDIA GB10)", *words])
        assert "\n" not in reason
