"""Claims of the literature: the file is checked as it is read, and a command's verdict is read from what it prints."""

import importlib
import random
from pathlib import Path

import pytest
from typer.main import get_command

from holdfast.cli import app
from holdfast.errors import HoldfastError, InputError
from holdfast.runs.claims import (
    FILE,
    Claim,
    Erratum,
    Gap,
    find_claim,
    read_claims,
    read_entries,
    repository,
    run_claim,
)
from holdfast.training import load_recipe

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "id": "flat-is-good",
    "source": "Doe, A Thesis, 2020, Table 1",
    "statement": "Flat minima are good.",
    "setup": "a toy",
    "command": "python flat.py",
    "result": "yes",
    "verdict": "confirmed",
    "date": "2026-01-01",
}


def write(path, *entries):
    path.write_text("\n".join("[[claim]]\n" + "\n".join(f"{k} = {v!r}" for k, v in e.items()) for e in entries))
    return path


def test_every_recorded_claim_has_a_command_that_exists():
    claims = read_claims(ROOT / FILE)
    assert claims
    for claim in claims:
        for command in filter(None, (claim.command, claim.small)):
            words = command.split()
            if words[0] == "holdfast":  # what only others can run
                assert claim.verdict == "not run", claim.id
                assert words[1] in get_command(app).commands, claim.id
                assert words[1] != "train" or load_recipe(words[2]), claim.id
                continue
            script = next((word for word in words if word.endswith(".py") or word.startswith("tests/")), "")
            assert script, claim.id
            assert (ROOT / script).exists(), claim.id


def test_a_finding_rests_on_three_seeds():
    """What is confirmed or refuted with random seeds has at least three; 0 stands for a deterministic check."""
    found = [claim for claim in read_claims(ROOT / FILE) if claim.verdict in ("confirmed", "refuted")]
    few = [claim.id for claim in found if claim.seeds in (1, 2)]
    assert not few


def judged_scripts():
    """Benchmarks with a function `judge`, which makes verdicts from their results."""
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    return [
        path.stem
        for path in scripts
        if "\ndef judge(record: dict[str, Any]) -> Iterator[Judgement]:" in path.read_text()
    ]


@pytest.mark.parametrize("name", judged_scripts())
def test_recorded_verdicts_follow_from_recorded_results(monkeypatch, name):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module, common = importlib.import_module(name), importlib.import_module("common")
    stem = getattr(module, "NAME", name.removesuffix("_claims"))
    found = {claim: verdict for claim, verdict, _ in module.judge(common.read_results(stem, common.RESULTS))}
    recorded = {claim.id: claim.verdict for claim in read_claims(ROOT / FILE) if claim.verdict != "not run"}
    assert found == {claim: recorded.get(claim) for claim in found}
    own = [c.id for c in read_claims(ROOT / FILE) if f"benchmarks/{stem}.py" in c.command and c.verdict != "not run"]
    assert set(own) <= set(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "Flat is good"}, "lower-case"),
        ({"result": ""}, "'result' is missing"),
        ({"verdict": "not run"}, "'reason' is missing"),
        ({"verdict": "perhaps"}, "unknown value 'perhaps'"),
        ({"seed": 3}, "seed"),
    ],
)
def test_an_entry_that_is_wrong_is_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        read_claims(write(tmp_path / "claims.toml", GOOD | change))


def test_every_erratum_names_a_test_that_exists():
    errata = read_entries(ROOT / FILE, "erratum", Erratum)
    assert len(errata) > 10
    for erratum in errata:
        path, _, name = erratum.test.partition("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), erratum


@pytest.mark.parametrize(("key", "kind"), [("erratum", Erratum), ("gap", Gap)])
def test_an_erratum_or_a_gap_with_an_unknown_field_is_refused(tmp_path, key, kind):
    (tmp_path / "claims.toml").write_text(f"[[{key}]]\nsource = 'Doe'\nhm = 'x'\n")
    with pytest.raises(InputError, match="hm"):
        read_entries(tmp_path / "claims.toml", key, kind)


def test_two_claims_with_one_id_are_refused(tmp_path):
    with pytest.raises(InputError, match="two claims with the id 'flat-is-good'"):
        read_claims(write(tmp_path / "claims.toml", GOOD, GOOD))


def test_an_unknown_id_gets_a_suggestion():
    with pytest.raises(InputError, match="flat-is-good"):
        find_claim([Claim(**GOOD)], "flat-is-god")


def script(tmp_path, text):
    (tmp_path / "flat.py").write_text(f"import sys\n{text}\n")
    return Claim(**GOOD, small="python flat.py --small")


def test_the_last_verdict_that_is_printed_counts(tmp_path):
    text = (
        "print('claim other: refuted'); print('claim flat-is-good: ' + ('refuted' if '--small' in sys.argv else 'x'))"
    )
    claim = script(tmp_path, text)
    assert run_claim(claim, tmp_path, small=True) == "refuted"
    assert run_claim(claim, tmp_path) == "x"


def test_results_of_a_repeated_run_are_kept_apart(tmp_path):
    claim = script(tmp_path, "print('claim flat-is-good: ' + sys.argv[sys.argv.index('--out') + 1])")
    assert run_claim(claim, tmp_path) == str(tmp_path / "runs" / "claims" / "flat-is-good")


@pytest.mark.parametrize(("text", "message"), [("sys.exit(3)", "exit code 3"), ("print('hm')", "printed no line")])
def test_a_command_without_a_verdict_is_an_error(tmp_path, text, message):
    with pytest.raises(HoldfastError, match=message):
        run_claim(script(tmp_path, text), tmp_path)


def test_a_claim_without_a_small_version_says_so(tmp_path):
    with pytest.raises(InputError, match="no small version"):
        run_claim(Claim(**GOOD), tmp_path, small=True)


def test_the_repository_is_found_from_a_folder_inside_it(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    write(tmp_path / FILE, GOOD)
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    assert repository(inside) == tmp_path


def test_three_claims_drawn_at_random_are_repeated_to_the_same_verdict(tmp_path):
    small = [claim for claim in read_claims(ROOT / FILE) if claim.small]
    for claim in random.Random(0).sample(small, 3):
        assert run_claim(claim, ROOT, small=True, results=tmp_path) == claim.verdict
