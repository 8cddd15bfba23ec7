from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sm120tune.errors import UserError
from sm120tune.measure.routing import Routing, parse_routing, tokens_per_expert, topk_ids, topk_weights
from sm120tune.problem import MoEProblem

PLAIN = MoEProblem(experts=16, intermediate=32, hidden=64, topk=2, router_experts=16)
SHARED = MoEProblem(experts=17, intermediate=32, hidden=64, topk=3, router_experts=16, shared_experts=1)
PARALLEL = MoEProblem(experts=4, intermediate=32, hidden=64, topk=2, router_experts=16)


def recording(folder: Path, ids: list[list[int]]) -> Path:
    path = folder / "ids.npy"
    np.save(path, np.array(ids))
    return path


@pytest.fixture
def routing(tmp_path: Path) -> Routing:
    rows = [[i % 16, (3 * i + 1) % 16] for i in range(40)]
    return parse_routing(f"file:{recording(tmp_path, [row for row in rows if row[0] != row[1]])}")


def test_tokens_are_consecutive_and_go_round(routing: Routing) -> None:
    recorded = np.load(routing.path)
    for m, seed in ((1, 0), (7, 3), (3 * len(recorded), 1)):
        ids = topk_ids(PLAIN, m, routing, seed)
        (start,) = [
            s for s in range(len(recorded)) if np.array_equal(ids, recorded[(s + np.arange(m)) % len(recorded)])
        ][:1]
        assert 0 <= start < len(recorded)
    assert not np.array_equal(topk_ids(PLAIN, 7, routing, 0), topk_ids(PLAIN, 7, routing, 5))


def test_a_shared_expert_and_other_ranks_are_as_in_any_routing(routing: Routing) -> None:
    shared = topk_ids(SHARED, 9, routing, 2)
    assert shared[:, -1].tolist() == [16] * 9
    assert topk_weights(SHARED, 9, routing, 2)[:, -1].tolist() == [1.0] * 9
    local = topk_ids(PARALLEL, 30, routing, 2)
    everywhere = topk_ids(PLAIN, 30, routing, 2)
    assert np.array_equal(local, np.where(everywhere < 4, everywhere, -1))
    assert tokens_per_expert(PARALLEL, 30, routing, 2).sum() == (local >= 0).sum()


def test_torch_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ids.pt"
    torch.save(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), path)
    assert topk_ids(PLAIN, 2, parse_routing(f"file:{path}"), 0).shape == (2, 2)


def test_the_text_names_the_content(tmp_path: Path) -> None:
    path = recording(tmp_path, [[1, 2]])
    text = str(parse_routing(f"file:{path}"))
    assert text.startswith(f"file:{path}#")
    assert str(parse_routing(text)) == text
    np.save(path, np.array([[2, 1]]))
    with pytest.raises(UserError, match="has changed since"):
        parse_routing(text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (np.zeros((2, 2)), "not integer topk_ids"),
        (np.zeros(4, dtype=int), "not integer topk_ids"),
        (np.array([[1, -1]]), "holds the id -1"),
        (np.array([[1, 2, 3], [4, 0, 4]]), r"gives token 1 an expert twice \(\[4, 0, 4\]\)"),
        (np.array([[1, 2**63]], dtype=np.uint64), "holds the id 9223372036854775808"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: np.ndarray, words: str) -> None:
    path = tmp_path / "other.npy"
    np.save(path, content)
    with pytest.raises(UserError, match=words):
        parse_routing(f"file:{path}")


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.npy"
    damaged.write_bytes(b"no array")
    for path, words in (
        (damaged, "cannot be read"),
        (tmp_path / "none.npy", "cannot be read"),
        (tmp_path / "ids.csv", "give a .npy"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            parse_routing(f"file:{path}")
        assert "\n" not in str(caught.value)


def test_a_recording_of_another_layer_is_refused(routing: Routing) -> None:
    with pytest.raises(UserError, match="this layer has 3 of 16 experts"):
        topk_ids(MoEProblem(experts=16, intermediate=32, hidden=64, topk=3, router_experts=16), 4, routing, 0)
    with pytest.raises(UserError, match="2 of 8 experts"):
        topk_ids(MoEProblem(experts=8, intermediate=32, hidden=64, topk=2, router_experts=8), 4, routing, 0)
