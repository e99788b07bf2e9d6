"""`fcl init` writes a params.yaml for a folder of images, whose comments give the reasons."""

from pathlib import Path

from fclmodels.errors import UserError
from fclmodels.settings.load import load_params
from flows.cli.init_choices import BATCH, ChosenSetting, Offer
from flows.cli.init_folder import FolderSummary
from flows.cli.init_machine import Machine

TEMPLATE = """\
# Written by `fcl init {folder}` for {count} images of {classes} classes{in_domains}, and for {machine}.
# `fcl params` explains every setting; settings that are not here have their defaults.

data:
  source: image-folder
  root: {root}
  domains: {domains} # whether there is a level of folders above those of the classes
  size: {size.value} # pixels a side, squashed; {size.why}
  channels: {channels} # {colours}
  skip_bad: false # true leaves out unreadable images instead of refusing them

stream:
{stream}

partition:
  kind: dirichlet # others: fcl list partitions
  clients: {clients} # so that each has about {each} images of a task
  alpha: 0.5 # 0.1: each client holds few classes; 100: all hold nearly the same mix
  val: 0.1 # share of each client's images for tuning

model:
  backbone: {backbone.value} # {backbone.why}; others: fcl list backbones
{network}{offer}
federation:
  rounds: {rounds.value} # {rounds.why}
  local_epochs: {local_epochs.value} # {local_epochs.why}
  batch_size: {batch_size}

optimizer:
  lr: 0.05

augment:
  flip: true # false where left and right matter, as in letters

methods: # settings of a method: fcl params METHOD
  fedavg: {{}}
  er:
    memory: {memory.value} # {memory.why}
  stamp: {{}}
  fot: {{}}
  fedprotip: {{}}

experiment: # for `fcl compare` and `fcl status`
  # {methods.why}
  methods: [{methods.value}]
  seeds: [0]
"""
DOMAINS = "  kind: domain-incremental # a task is a domain; class-incremental makes tasks of classes instead"
CLASSES = "  kind: class-incremental # each task brings new classes; others: fcl list streams\n  tasks: {tasks}"
NETWORKS = {
    "cnn": "",
    "resnet18": "  stem: cifar # for images of up to 64 pixels\n  norm: group # batch statistics differ by client\n",
}
OFFER = """\
  # Pretrained weights are at hand, {name}. To start from them:
  # {command}
"""


def write_params(
    summary: FolderSummary, machine: Machine, choices: dict[str, ChosenSetting], offer: Offer | None, params: Path
) -> None:
    """Write the settings file; raise UserError if it exists."""
    if params.exists():
        raise UserError(f"{params} exists already. Name another with --params, or remove it.")
    stream = DOMAINS if len(summary.domains) > 1 else CLASSES.format(tasks=summary.tasks)
    params.write_text(
        TEMPLATE.format(
            folder=summary.folder,
            count=summary.count,
            classes=len(summary.classes),
            in_domains=f" in {len(summary.domains)} domains" if summary.domains else "",
            root=_quote_for_yaml(summary.folder.resolve()),
            domains=str(bool(summary.domains)).lower(),
            channels=summary.channels,
            colours="all that were opened are grey" if summary.channels == 1 else "1 makes all grey",
            stream=stream,
            clients=summary.clients,
            each=summary.images_of_client,
            network=NETWORKS[choices["backbone"].value],
            offer=OFFER.format(name=offer.name, command=offer.command) if offer else "",
            machine=machine,
            batch_size=BATCH,
            **choices,
        )
    )
    load_params(params)


def _quote_for_yaml(text: Path | str) -> str:
    return "'" + str(text).replace("'", "''") + "'"
