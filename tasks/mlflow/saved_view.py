"""The view with which MLflow's pages open an experiment: runs grouped by method, their figures, and charts over tasks.

It is what a person would save under "Views": a tag of the experiment, in the pages' own format. The pages choose
between chat agents and model training by the address, or in other versions by the experiment's kind.
"""

import json

from mlflow import MlflowClient

from tasks.mlflow.naming import METRICS, READING

KEY = "fclflow"
VIEW = f"mlflow.sharedViewState.{KEY}"
AS_CHARTS = "&compareRunsMode=CHART"  # added to an address of list_addresses, it opens on the charts
ACC, FORGETTING = f"{METRICS['acc']}/{READING}", f"{METRICS['fgt']}/{READING}"
COSTS = ("total/bytes_up", "total/bytes_down", "total/seconds")
CHARTS = {
    "Accuracy and forgetting over tasks": ("LINE", (ACC, f"{METRICS['acc']}/task_aware", FORGETTING)),
    "Bytes and seconds": ("BAR", COSTS),
}


def list_addresses(client: MlflowClient, pages: str) -> dict[str, str]:
    """Return the addresses, by experiment, at which the pages of a server open with the view; the newest first."""
    return {
        experiment.name: f"{pages}/#/experiments/{experiment.experiment_id}/runs"
        f"?workflowType=machine_learning&viewStateShareKey={KEY}"
        for experiment in client.search_experiments()
        if VIEW in experiment.tags
    }


def describe_view() -> str:
    """Return the view as the pages store it: JSON with a name and, as JSON again, what differs from their defaults."""
    columns = [f"metrics.`{metric}`" for metric in (ACC, FORGETTING, *COSTS)]
    state = {
        "orderByKey": columns[0],
        "selectedColumns": columns,
        "columnOrder": columns,
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": "method"}]},
        "runsHiddenMode": "FIRST_20_RUNS",  # in charts; a group counts as one
        "compareRunSections": [{"uuid": title, "name": title, "display": True} for title in CHARTS],
        "isAccordionReordered": True,  # else the sections are sorted by name, with those of all other metrics
        "compareRunCharts": [
            {"uuid": metric, "type": kind, "metricKey": metric, "metricSectionId": title, "lineSmoothness": 0}
            for title, (kind, metrics) in CHARTS.items()
            for metric in metrics
        ],
    }
    return json.dumps({"name": "accuracy and cost", "createdAt": 0, "state": json.dumps(state)})
