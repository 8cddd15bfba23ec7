"""The two files of a pair: what they are together, and what a lone one is paired with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm120tune.check.content import ConfigFile, read_config
from sm120tune.check.findings import Finding, Level
from sm120tune.check.folders import other_folders
from sm120tune.check.reach import reachable
from sm120tune.check.rules import Rules


@dataclass(frozen=True)
class Partner:
    """The other file of a pair, and whether it lies in the same folder."""

    file: ConfigFile
    beside: bool


def find_partner(file: ConfigFile) -> Partner | None:
    """Return the partner beside a file, else that of the newest other Triton folder, as SGLang searches."""
    if file.name is None:
        return None
    name = file.name.partner()
    own = file.path.absolute().parent
    for folder in (own, *other_folders(file.path)):
        path = folder / name
        if path.is_file():
            label = str(Path(file.label).with_name(name)) if folder == own else f"{folder.name}/{name}"
            return Partner(read_config(path, label), folder == own)
    return None


def pair_findings(
    file: ConfigFile,
    partner: Partner | None,
    rules: Rules,
    max_tokens: int,
    *,
    twice: bool = False,
    installed: bool = False,
) -> list[Finding]:
    """Return what is wrong with a file and its partner.

    ``twice`` where the up file is checked by itself as well, ``installed`` where the files lie in the server's own
    tree, so that a partner that is not there is nowhere.
    """
    if file.name is None:
        return []
    found: list[Finding] = []
    if not file.name.down and file.tma_keys:
        found += _up_tma(file, rules)
    if partner is None:
        return [*found, _lone(file, installed)]
    if not partner.beside:
        what = f"no partner beside it: SGLang takes {partner.file.label}, which was tuned with another Triton"
        fix = "tune and install both files of a pair together"
        found.append(Finding(Level.WARNING, "partner-other-folder", file.label, what, fix))
    if twice:
        return found
    up_file, down_file = (partner.file, file) if file.name.down else (file, partner.file)
    up, down = set(up_file.rows), set(down_file.rows)
    if up != down:
        differ = "; ".join(
            f"only in {which}: {', '.join(map(str, sorted(keys)))}"
            for which, keys in (("up", up - down), ("down", down - up))
            if keys
        )
        what = f"up and down have different keys ({differ})"
        found.append(Finding(Level.WARNING, "pair-keys", file.label, what, "tune both with the same keys"))
    return found + _block_m(up_file, down_file, rules, max_tokens)


def _up_tma(file: ConfigFile, rules: Rules) -> list[Finding]:
    if rules.up_tma:
        return []
    keys = ", ".join(file.tma_keys)
    if rules.up_tma is None:
        what = "USE_TMA in an up file, on or off, raises KeyError at launch before SGLang 0.5.18"
        return [Finding(Level.WARNING, "up-tma", file.label, what, "remove it for servers before 0.5.18", keys)]
    what = f"USE_TMA in an up file, on or off, raises KeyError at launch of SGLang {rules.version}"
    return [Finding(Level.ERROR, "up-tma", file.label, what, "remove it, or use SGLang 0.5.18 or later", keys)]


def _lone(file: ConfigFile, installed: bool) -> Finding:
    assert file.name is not None
    if installed and not file.name.down:
        what = "no _down file in any folder of this tree: its rows serve the down GEMM too"
        return Finding(Level.INFO, "partner-missing", file.label, what)
    if file.name.down:
        what = "no up file: SGLang pairs these rows with its built-in default and its BLOCK_SIZE_M"
        fix = "tune and install both files of a pair together"
    else:
        what = "no _down file: its rows serve the down GEMM too, or any _down file that the server's tree has"
        fix = "tune both as a pair; a copy named _down keeps these rows"
    return Finding(Level.WARNING, "partner-missing", file.label, what, fix)


def _block_m(up: ConfigFile, down: ConfigFile, rules: Rules, max_tokens: int) -> list[Finding]:
    found: list[Finding] = []
    for reach in reachable(list(up.rows), list(down.rows), max_tokens):
        wanted, has = up.rows[reach.up_key].BLOCK_SIZE_M, down.rows[reach.down_key].BLOCK_SIZE_M
        if wanted == has:
            continue
        what = f"the down row {reach.down_key} has BLOCK_SIZE_M {has}, the up row {reach.up_key} has {wanted}"
        if rules.overrides_block_m:
            level, effect = Level.WARNING, f"SGLang {rules.version} runs it with {wanted}, which nobody tuned"
        elif rules.overrides_block_m is None:
            level, effect = Level.ERROR, "an assert ends servers up to 0.5.12, later ones override it untuned"
        else:
            level, effect = Level.ERROR, f"SGLang {rules.version} stops at an assert"
        fix = "tune both files as a pair"
        found.append(Finding(level, "pair-block-m", down.label, f"{what}: {effect}", fix, f"M={reach.label}"))
    return found
