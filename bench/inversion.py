"""What GLFC's server gets back of its clients' prototypes: images and labels from gradients.

    python bench/inversion.py [--clients 3] [--set methods.glfc.inversion=sgd]

Each client's prototypes in the first task, rebuilt as the server does it. The error is the mean squared difference of
an image from the sample of the client that it began as, in variances of the samples' pixels: unrelated images have 2.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from runs import make_splits

from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.client import Client
from fclmodels.federation.run_context import Run
from fclmodels.methods.glfc import Glfc
from fclmodels.methods.parts.proxy_server import Inversion, find_prototype
from fclmodels.numerics.gradient_inversion import infer_label
from fclmodels.settings import load as reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    params = reading.load_params(options.params, options.set, "glfc", 0)
    settings = reading.load_method_settings(params, "glfc")
    with tempfile.TemporaryDirectory() as folder:
        method = Glfc(settings, Run.on(params, Splits.open(make_splits(params, Path(folder))), 0))
        server = method.start_task(method.create_server(), 0)
        errors, moved, right, seconds = [], [], [], []
        for index in method.list_participants(0)[: options.clients]:
            client = Client(index, 0, -1001, method.run, method.select_rows(0, index), {})
            training = method.prepare_training(client, method.make_payload(server))
            training.run()
            samples = method.run.batches.prepare_inputs(method.run.batches.read_raw(client.rows))
            gradients = method.proxy.make_gradients(training.network, samples)
            variance = float(samples.inputs.var())
            for place, label in enumerate(server.spec.tasks[0]):
                if not (mine := samples.labels == label).any():
                    continue
                sample = find_prototype(training.network, samples.inputs[mine])
                image = method.proxy.perturb(training.network, sample, samples.take(mine.nonzero()[0]))
                gradient = [tensor[place] for tensor in gradients.values()]
                work = Inversion(method.proxy.draw_encoder(server.spec), [gradient], settings, server.spec.shape)
                started = time.perf_counter()
                torch.manual_seed(place)
                work.step(0)
                seconds.append(time.perf_counter() - started)
                errors.append(float((work.images[0][-1:] - sample).square().mean()) / variance)
                moved.append(float((image - sample).square().mean()) / variance)
                right.append(int(infer_label(gradient)) == label)
        print(
            f"{len(errors)} prototypes: labels right {100 * sum(right) / len(right):.0f} %, error {max(errors):.2g} at "
            f"most and {sum(errors) / len(errors):.2g} on average, of the moved image itself "
            f"{sum(moved) / len(moved):.2g}, {sum(seconds) / len(seconds):.1f} s each"
        )


if __name__ == "__main__":
    main()
