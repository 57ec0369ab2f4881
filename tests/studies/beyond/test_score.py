"""The rule that chooses a score, on numbers made by hand."""

from __future__ import annotations

from byov.studies.beyond.score import _task, draw, ranking


def rows() -> list[dict]:
    table = {"errors": (0.6, 0.7, 0.9), "mnist": (0.9, 0.8, 0.99), "noise 3": (0.5, 0.6, 0.99)}
    names = ("label_free_a", "label_free_b", "max_softmax")
    return [
        {"method": "byov", "seed": seed, "task": task, "score": name, "auroc": value}
        for seed in (0, 1)
        for task, values in table.items()
        for name, value in zip(names, values, strict=True)
    ]


def test_the_best_average_rank_wins_and_baselines_with_labels_cannot() -> None:
    assert ranking(rows()) == {"label_free_b": 4 / 3, "label_free_a": 5 / 3}
    assert next(iter(ranking(rows()))) == "label_free_b"


def test_keys_of_the_evaluation_name_task_and_score() -> None:
    assert _task("selective.energy.error_auroc") == ("errors", "energy")
    assert _task("ood.mnist.label_free_knn.auroc") == ("mnist", "label_free_knn")
    assert _task("noise.knn.auroc.3") == ("noise 3", "label_free_knn")
    assert _task("noise.knn.auroc.1")[0] is None
    assert _task("noise.knn.mean.3")[0] is None
    assert _task("draws.top1")[0] is None


def test_the_picture_has_a_line_for_each_score() -> None:
    figure = draw(rows(), "micro")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "BYOV, label-free: a",
        "BYOV, label-free: b",
        "BYOV, probe: max_softmax",
    ]
