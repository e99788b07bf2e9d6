"""Facts about the runs on a page: what was compared, caveats, privacy ledger, settings, versions and digests."""

from collections.abc import Sequence
from typing import Any

from fclmodels.report import labels
from fclmodels.report.comparison import summarise_ledger
from fclmodels.report.paper_figures import list_paper_notes
from fclmodels.report.read_runs import Group, RunFolder


def describe_runs(runs: Sequence[RunFolder], common: dict[str, str]) -> list[str]:
    """Return the words of one line that says what was compared on what, as far as all runs agree."""
    tasks = {run.tasks for run in runs}
    forms = {
        "data.source": "{}",
        "stream.kind": "{}",
        "partition.kind": "{} partition",
        "partition.clients": "{} clients",
    }
    facts = [f"{len(runs)} runs" if len(runs) > 1 else "1 run"]
    facts += [f"{n} tasks" if n > 1 else "1 task" for n in tasks if len(tasks) == 1]
    return facts + [form.format(common[name]) for name, form in forms.items() if name in common]


def list_notes(groups: Sequence[Group]) -> list[str]:
    """Return what a reader must know before comparing."""
    runs = [run for group in groups for run in group.runs]
    notes = []
    splits = len({str(run.result.digests.get("splits")) for run in runs})
    if splits > 1:
        notes.append(f"Made on {splits} different data splits: compare methods only where each was run on all of them.")
    if len({frozenset(run.result.seed for run in group.runs) for group in groups}) > 1:
        notes.append("The methods were not run with the same seeds.")
    if alone := [group.label for group in groups if len(group.runs) == 1]:
        single = "each" if len(alone) == len(groups) > 1 else ", ".join(alone)
        notes.append(f"Only one seed of {single}: no standard deviation, and differences may be chance.")
    versions = [run.result.versions for run in runs]
    names = sorted({name for of in versions for name in of})
    changed = [name for name in names if len({str(of.get(name)) for of in versions}) > 1]
    if changed:
        notes.append(f"The runs were made with different versions of {', '.join(changed)}.")
    remarks = [f"{group.label}: {remark}." for group in groups for remark in group.runs[0].result.remarks]
    return [*notes, *list_paper_notes(groups), *remarks]


def list_parts(group: Group) -> list[dict[str, Any]]:
    """Return the rows of a group's privacy ledger, each with when its part is sent."""
    parts = summarise_ledger(group).to_dicts()
    for part in parts:
        part["when"] = ", ".join(["each round"] * part["in_rounds"] + ["end of task"] * part["at_end"])
    return parts


def describe_privacy(group: Group) -> str | None:
    """Return the privacy that the method's noise gives, in the run where it gives least."""
    released = [run.result.privacy for run in group.runs if run.result.privacy]
    return labels.describe_privacy(**max(released, key=lambda of: of.epsilon).model_dump()) if released else None


def compare_settings(groups: Sequence[Group]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the settings that all runs share, and those that differ with their values in each group."""
    runs = [run for group in groups for run in group.runs]
    names = sorted({name for run in runs for name in run.settings})
    common = {n: runs[0].settings.get(n, "") for n in names if len({run.settings.get(n) for run in runs}) == 1}
    differing = {
        name: [", ".join(dict.fromkeys(run.settings.get(name, "–") for run in group.runs)) for group in groups]
        for name in names
        if name not in common
    }
    return common, differing


def compare_provenance(runs: Sequence[RunFolder]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the versions and digests that all runs share, and those that differ, run by run."""
    facts = [_collect_provenance(run) for run in runs]
    names = dict.fromkeys(name for of in facts for name in of)
    columns = {name: [of.get(name, "–") for of in facts] for name in names}
    same = {name: column[0] for name, column in columns.items() if len(set(column)) == 1}
    return same, {name: column for name, column in columns.items() if name not in same}


def _collect_provenance(run: RunFolder) -> dict[str, str]:
    digests = {f"{name} digest": str(digest)[:12] for name, digest in run.result.digests.items()}
    return digests | {name: str(version) for name, version in run.result.versions.items()}
