"""Settings of a run outside of a theorem's assumptions."""

from run_folders import build_run

from fclmodels.report.sections.theorem_assumptions import ALL_CLIENTS, PLAIN_SGD, list_uncovered


def test_settings_that_a_theorem_does_not_cover_are_listed_with_their_values():
    optimizer = {"kind": "adam", "momentum": 0.0, "weight_decay": 0.1}
    run = build_run(
        "special", {"optimizer": optimizer, "augment": {"flip": False}, "federation": {"clients_per_round": 2}}
    )
    assert list_uncovered(run, PLAIN_SGD) == ["optimizer.kind: adam", "optimizer.weight_decay: 0.1"]
    assert list_uncovered(run, ALL_CLIENTS) == ["federation.clients_per_round: 2"]


def test_a_setting_that_a_run_does_not_have_is_covered():
    assert list_uncovered(build_run("special", {}), PLAIN_SGD) == []
