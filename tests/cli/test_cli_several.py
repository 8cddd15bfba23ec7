from __future__ import annotations

import json

from command_line import CARD, CommandLine, InProcess

from sm120tune.provenance import load

CARD_FILE = CARD.replace(" ", "_")
# Not the other tests' small problem, whose journal lies in the same cache.
JOBS = """
[[job]]
experts = 16
inter = 256
hidden = 128
topk = 2
tp = [1, 2]

[[job]]
experts = 8
inter = 256
hidden = 128
topk = 2
"""


def test_several_tp_are_several_layers(command: InProcess) -> None:
    done = command.run(*command.line.args("--tp", "1,2,4", "--batch-sizes", "1", "--dry-run", "--json"))
    assert done.code == 0, done.err
    files = [plan["files"][0] for plan in json.loads(done.out)["jobs"]]
    assert files == [f"E=16,N={n},device_name={CARD_FILE}.json" for n in (256, 128, 64)]
    assert "1 of 3" in done.err


def test_a_tp_that_cannot_be_is_told_before_any_work(command: InProcess) -> None:
    command.refused(*command.line.args("--tp", "1,3"), words=["--inter 256", "3"])
    command.refused(*command.line.args("--tp", "1,x"), words=["--tp", "'1,x'"])
    command.refused(*command.line.args("--tp", "2,2"), words=["--tp", "twice"])


def test_two_layers_of_one_file_become_one_file(line: CommandLine) -> None:
    path = line.folder / "jobs.toml"
    path.write_text(JOBS + "[[job]]\nexperts = 8\ninter = 256\nhidden = 512\ntopk = 2\n")
    args = ["--jobs", str(path), "--device", CARD, "--timer", "model", "--sglang", str(line.sglang), "--json"]
    done = line.run(*args, "--batch-sizes", "512", "--trials", "2")
    assert done.code == 0, done.err
    assert len(done.document["jobs"]) == 3
    shared = done.document["jobs"][2]
    record = load(line.folder / shared["provenance"][0])
    assert [problem.hidden for problem in record.problems] == [128, 512]
    assert "layer 2 of 2 that share the file: E=8 N=256 hidden=512" in done.err
    again = line.run(*args, "--batch-sizes", "512", "--trials", "2")
    assert again.document["jobs"][2]["resumed"] >= 4
    refused = line.run(*args, "--keys", "auto")
    assert refused.code == 2
    assert all(word in refused.err for word in ("--keys auto", "hidden=128", "hidden=512", "share a file"))


def test_jobs_bring_their_own_numbers(command: InProcess) -> None:
    line = command.line
    path = line.cache.parent / "jobs.toml"
    path.write_text(JOBS)
    args = ["--jobs", str(path), "--device", CARD, "--timer", "model", "--sglang", str(line.sglang)]
    command.refused(*args, "--tp", "2", words=["--jobs", "--tp"])


def test_a_job_file_ends_with_one_summary(line: CommandLine) -> None:
    path = line.folder / "jobs.toml"
    path.write_text(JOBS)
    args = ["--jobs", str(path), "--device", CARD, "--timer", "model", "--sglang", str(line.sglang), "--json"]
    done = line.run(*args, "--batch-sizes", "512", "--trials", "2")
    assert done.code == 0, done.err
    keys = [job["files"][0].rpartition("/")[2].split(",device")[0] for job in done.document["jobs"]]
    assert keys == ["E=16,N=256", "E=16,N=128", "E=8,N=256"]
    assert done.err.count("summary") == 1
    summary = done.err.split("summary")[1]
    assert all(f"E={e} N={n} hidden=128" in summary for e, n in ((16, 256), (16, 128), (8, 256)))
    again = line.run(*args, "--batch-sizes", "512", "--trials", "2")
    assert [job["resumed"] >= 2 for job in again.document["jobs"]] == [True] * 3
