"""Train with the workers of Dask: python dask_workers.py

This process has the weights and updates them. Each worker computes the gradient of its part of a batch.
"""

import numpy as np
from dask.distributed import Client
from problem import network, report, train

from refgrad.training import Adam, PartGradient, part_of, step_model

COUNT = 2


def main() -> None:
    """Train on two workers of this machine. `Client(address)` takes the workers of a cluster."""
    step = step_model(network(), "cross_entropy", Adam())
    places = [(rank, COUNT) for rank in range(COUNT)]
    with Client(n_workers=COUNT, threads_per_worker=1, dashboard_address=None) as client:
        workers = list(client.scheduler_info()["workers"])
        actors = [
            client.submit(PartGradient, step, place=place, actor=True, workers=[worker]).result()
            for place, worker in zip(places, workers, strict=True)
        ]

        def sums(batch: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            asked = [actor.sums(part_of(batch, place), state) for actor, place in zip(actors, places, strict=True)]
            found = [future.result() for future in asked]
            return {name: sum(arrays[name] for arrays in found) for name in found[0]}

        report(train(sums=sums))


if __name__ == "__main__":
    main()
