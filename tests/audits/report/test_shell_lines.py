"""Commands that we print can be pasted: each part is one word for the shell, whatever the things are called."""

import ast
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast
from audit_makers import TRUST, make, make_bracket
from holdfast.audits.report.advice import next_steps
from holdfast.audits.report.card import model_card
from holdfast.audits.report.markdown import fenced, plain
from holdfast.data import load_data
from holdfast.errors import InputError, StorageError
from holdfast.runs.finished import read_runs

NAMES = [
    "two words",
    "a; touch TRAP",
    "$(touch TRAP)",
    "`touch TRAP`",
    "it's",
    'say "hello"',
    "a\ntouch TRAP\n",
    "```\n# Not a heading",
    "a & touch TRAP &",
    "> TRAP",
    "*",
    "~",
    "$HOME",
    "a\\",
    "MODEL",
    "-n",
    "ünïcödé",
    "!!",
    "a (test",
]
SOURCE = Path(holdfast.__file__).parent


def words_of(line, folder):
    """What a shell makes of the line; it must run nothing but the command itself."""
    script = f'holdfast() {{ printf "%s\\0" "$@"; }}\n{line}\n'
    done = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "the line did something else"
    return done.stdout.decode().split("\0")[:-1]


def command_in(card):
    """The block of code at the end of a card, by the rule of CommonMark: a fence ends at one that is as long."""
    opening, text = re.search(r"^(`{3,})sh\n(.*)\Z", card, re.MULTILINE | re.DOTALL).groups()
    body, end = [], False
    for line in text.split("\n"):
        if re.fullmatch(rf"`{{{len(opening)},}}\s*", line):
            end = True
            break
        body.append(line)
    assert end
    return "\n".join(body)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_the_model_card_is_read_as_it_was_meant(tmp_path, name):
    audit = replace(make(), data=f"{name} (test)")
    words = words_of(command_in(model_card(audit)), tmp_path)
    assert words == [
        *("audit", "MODEL", "--data", name, "--threat", "linf:0.2", "--n", "10", "--budget", "quick", "--seed", "7")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_a_name_is_markup_of_the_card(name):
    audit = replace(make(skipped=(name,), trust=TRUST), data=name, hashes={name: name}, versions={name: name})
    card = model_card(audit)
    text = card.replace(command_in(card), "")
    for line in text.split("\n"):
        assert not line.startswith(("# ", "> ", "    ")) or line.startswith("## Adversarial robustness")
    outside = re.sub(r"^`{3,}.*$", "", text, flags=re.MULTILINE)
    assert "touch TRAP`" not in outside.replace("\\`", "")
    assert "<" not in outside.replace("\\<", "")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threat", ["linf:0.2", "l2:0.2", "l2:0.2, smoothed with noise $(touch TRAP)"])
def test_the_commands_of_the_report_are_read_as_they_were_meant(tmp_path, name, threat):
    audit = replace(make(brackets=(make_bracket(threat, trust=TRUST),)), data=f"{name} (test)")
    steps = next_steps(audit)
    assert steps
    for step in steps:
        words = words_of(step.command, tmp_path)
        assert words[0] in ("audit", "attack", "certify", "explain", "train")
        if "--data" in words:
            assert words[words.index("--data") + 1] == name
        assert not [word for word in words if "TRAP" in word and word != name]


def test_a_data_set_that_is_called_model_keeps_its_name():
    """The file of the model is put in the place of MODEL, and of nothing else."""
    audit = replace(make(brackets=(make_bracket("l2:0.5", proved=False),)), data="MODEL (test)")
    for step in next_steps(audit):
        words = shlex.split(step.command)
        assert "--data" not in words or words[words.index("--data") + 1] == "MODEL"


@pytest.mark.parametrize("name", [name for name in NAMES if "/" not in name and name != "-n"])
def test_a_run_that_is_not_finished_says_how_to_go_on(tmp_path, name):
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text("epochs = 1\n")
    with pytest.raises(InputError, match="Finish it: ") as caught:
        read_runs([folder])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert words_of(str(caught.value).partition("Finish it: ")[2], empty) == ["train", str(folder), "--resume"]


@pytest.mark.parametrize("name", ["two words", "$(touch TRAP)", "it's"])
def test_data_that_are_missing_say_how_to_get_them(tmp_path, name):
    with pytest.raises(StorageError, match="to download it") as caught:
        load_data("cifar10", root=tmp_path / name)
    line = re.search("Run `(.*)` to download", str(caught.value))[1]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert words_of(line, empty) == ["data", "get", "cifar10", "--root", str(tmp_path / name)]


def commands(tree):
    """Every formatted text that holds a command and, after it, something that is put in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            seen = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    seen += str(part.value)
                elif re.search(r"\bholdfast [a-z]+( |$)[^;.`'\"]*$", seen):
                    yield node.lineno, ast.unparse(part.value)


def test_no_command_is_put_together_without_quoting():
    """So that the next one is not forgotten: use shlex.join, or `holdfast.audits.report.commands.command`."""
    found = [
        (path.relative_to(SOURCE), line, text)
        for path in SOURCE.rglob("*.py")
        for line, text in commands(ast.parse(path.read_text(encoding="utf-8")))
        if "shlex." not in text
    ]
    assert found == []
    assert list(commands(ast.parse('f"Go on: holdfast train {folder} --resume"'))) == [(1, "folder")]


def test_fences_and_plain_text():
    assert fenced("a") == "```sh\na\n```"
    assert fenced("````") == "`````sh\n````\n`````"
    assert plain("a\n*b* $c$ <d> \\") == r"a \*b\* \$c\$ \<d\> \\"
