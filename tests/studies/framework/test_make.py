"""All studies from one command: each in a process of its own, those that train more first, none in another's way."""

from __future__ import annotations

import sys

import pytest

from byov._core.errors import BadInput
from byov.cli import main as cli
from byov.studies.framework import lab as labs
from byov.studies.framework import make
from byov.studies.framework.workers import Order, side_by_side


def test_a_failed_study_stops_no_other_and_says_why(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["fig2", "score", "working-point"]
    monkeypatch.setattr(make, "names", lambda: names)
    monkeypatch.setattr(lab, "train", lambda configs: list(configs))
    program = 'import sys; print("byov: no such images.", file=sys.stderr); sys.exit(2 * (sys.argv[1] == "score"))'
    monkeypatch.setattr(lab, "command", lambda name: [sys.executable, "-c", program, name])
    begun: list[str] = []

    def noted(orders: list[Order], jobs: int):
        begun.extend(order.command[-1] for order in orders)
        return side_by_side(orders, jobs)

    monkeypatch.setattr(make, "side_by_side", noted)
    assert dict(make.make_all(lab)) == {"fig2": None, "score": "no such images.", "working-point": None}
    assert begun == ["working-point", "fig2", "score"]


def test_the_command_of_a_study_makes_the_same_lab(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(make, "make", lambda name, lab: made.append((name, lab)) or tmp_path)
    monkeypatch.setattr(labs.fetch, "is_there", lambda name: True)
    given = labs.Lab(tmp_path / "a b", "fashion", 2, "mnist", 3, ["srun", "python 3"])
    python, m, byov, *arguments = given.command("fig2")
    assert (python, m, byov) == (sys.executable, "-m", "byov")
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    ((name, again),) = made
    assert name == "fig2"
    for what in ("folder", "name", "scale", "seeds", "jobs", "launch"):
        assert getattr(again, what) == getattr(given, what)


def test_a_study_that_lacks_something_is_told_before_anything_is_trained(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(lab: labs.Lab) -> list[object]:
        raise BadInput("there are no tasks.")

    monkeypatch.setattr(make, "names", lambda: ["fig2", "priors-tasks"])
    monkeypatch.setattr(make.find("priors-tasks"), "runs", lacking)
    done: list[str] = []
    monkeypatch.setattr(lab, "train", lambda configs: done.append(f"{len(configs)} trained"))
    monkeypatch.setattr(lab, "command", lambda name: [sys.executable, "-c", ""])
    for name, why in make.make_all(lab):
        done.append(f"{name}: {why}")
    assert done == ["priors-tasks: there are no tasks.", f"{len(make.find('fig2').runs(lab))} trained", "fig2: None"]


def test_quotes_that_do_not_close_are_bad_input(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["study", "fig2", "--launch", "'srun", "--out", str(tmp_path)])
    assert "fix the quoting" in capsys.readouterr().err


@pytest.mark.parametrize(("why", "code"), [(None, 0), ("no such images.", 1)])
def test_all_says_what_was_made_and_what_was_not(
    why: str | None, code: int, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make, "make_all", lambda lab: iter([("fig2", None), ("score", why)]))
    with pytest.raises(SystemExit, match=str(code)):
        cli.main(["study", "all", "--out", str(tmp_path)])
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"written: {tmp_path}/fig2/micro"
    if why:
        assert "failed: score: no such images." in err and "some studies failed (score)" in err
