"""Sixty planning problems, each a pure function of its seed, as the files and options that hetpipe takes."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GBIT = 1e9 / 8
MANY = 50  # devices, from which on nodes are equal and links fast
SIZES = ((1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (2, 4), (1,), (3, 4, 8))
"""Microbatch sizes that a profile may have been measured at."""
MEMORY = {"ample": (1.1, 3.0), "tight": (0.2, 0.7), "scant": (0.05, 0.3)}
"""Of a device, as a share of the model with four samples in flight."""
PLAIN = (*[(2, 8, 5, 14)] * 26, *[(9, 24, 12, 26)] * 9, *[(25, 40, 14, 26)] * 4, *[(64, 64, 14, 26)] * 3)
"""Least and most devices, least and most layers; of the problems that every strategy plans."""
LARGE = (208, 208, 34, 34)
FORCED: tuple[tuple[str, ...], ...] = (
    ("--pin", "{0}=0-2"),
    ("--pin", "{1}=1-3", "--pin", "{0}=0"),
    ("--pin", "{-1}={last}"),
    ("--pipelines", "1"),
    ("--pipelines", "2"),
    ("--pipelines", "3", "--max-devices", "6"),
    ("--max-devices", "1"),
    ("--max-devices", "3"),
    ("--max-devices", "4", "--microbatch-size", "2"),
    ("--exclude", "{0}"),
    ("--exclude", "{0}", "--exclude", "{-1}"),
    ("--exclude", "{1}", "--pin", "{0}=0-1", "--pipelines", "2"),
    ("--microbatch-size", "3"),
    ("--schedule", "list"),
    ("--schedule", "gpipe"),
    ("--pipelines", "1", "--max-devices", "5", "--schedule", "auto"),
    ("--strategy", "pipedream"),
)
"""Options of the problems that are planned through the command line; {0} is the first device."""


@dataclass(frozen=True, slots=True)
class Case:
    """A problem: cluster.toml, profile.json, the batch, and options of `hetpipe plan`.

    Without options it is for every strategy.
    """

    name: str
    cluster: str
    profile: Mapping[str, Any]
    global_batch_size: int
    options: tuple[str, ...] = ()


def all_cases() -> list[Case]:
    """Return all problems: those for every strategy, a large one, and those that are forced."""
    shapes = [*PLAIN, LARGE]
    plain = [_case(seed, shape) for seed, shape in enumerate(shapes)]
    forced = [
        _case(100 + index, (4, 12, 6, 14) if index % 4 else (16, 24, 12, 20), options)
        for index, options in enumerate(FORCED)
    ]
    return plain + forced


def _case(seed: int, shape: tuple[int, int, int, int], options: Sequence[str] = ()) -> Case:
    rng = random.Random(f"same answers {seed}")
    num_devices, num_layers = rng.randint(*shape[:2]), rng.randint(*shape[2:])
    num_kinds = min(num_devices, rng.choice([1, 2, 2, 3, 4]))
    kinds = [f"kind-{index}" for index in range(num_kinds)]
    memory = rng.choice(["ample", "tight"] if options else sorted(MEMORY))
    slow = rng.random() < 0.4 and num_devices < MANY
    tied = rng.random() < 0.35
    profile = _profile(rng, kinds, num_layers, tied=tied)
    cluster, names = _cluster(rng, profile, num_devices, memory, slow=slow)
    places = {str(index): name for index, name in enumerate(names)}
    places |= {"-1": names[-1], "last": str(num_layers - 1)}
    words = [_filled(word, places) for word in options]
    batch = round(num_devices * 2 ** rng.uniform(1, 4 if num_devices < 25 else 2))
    traits = [memory, *(["slow"] if slow else []), *(["tied"] if tied else []), *words]
    name = f"{seed}: {num_devices} devices, {num_layers} layers, {' '.join(traits)}"
    return Case(name, cluster, profile, max(2, batch), tuple(words))


def _filled(word: str, places: Mapping[str, str]) -> str:
    for key, value in places.items():
        word = word.replace("{" + key + "}", value)
    return word


def _profile(rng: random.Random, kinds: Sequence[str], num_layers: int, *, tied: bool) -> dict[str, Any]:
    """Return profile.json's data: equal blocks between a light embedding and a heavy head, or all unequal."""
    sizes = rng.choice(SIZES)
    unequal = rng.random() < 0.3
    parameters, saved, seconds = (
        10 ** rng.uniform(6.5, 7.5),
        10 ** rng.uniform(6, 8),
        10 ** rng.uniform(-2.5, -1.5),
    )
    factors = [rng.uniform(0.5, 1.5) if unequal else 1.0 for _ in range(num_layers)]
    heavy = [rng.uniform(0.5, 5), rng.uniform(0.5, 5)]
    layers: list[dict[str, Any]] = []
    for index, factor in enumerate(factors):
        ends = heavy[0] if index == 0 else heavy[1] if index == num_layers - 1 else 1.0
        layers.append(
            {
                "name": f"layer-{index}",
                "parameter_bytes": 4 * parameters * factor * ends,
                "output_bytes_per_sample": saved * rng.choice([0.02, 0.1]),
                "saved_bytes_per_sample": saved * factor,
                "tied_to": None,
            }
        )
    if tied:
        layers[-1] |= {
            "tied_to": "layer-0",
            "tied_bytes": 0.9 * min(layers[k]["parameter_bytes"] for k in (0, -1)),
        }
    if rng.random() < 0.4:
        for layer in layers[1:-1]:
            layer["workspace_by_size"] = [[size, saved * (0.5 + size / 4)] for size in sizes]
    work = [seconds * factor for factor in factors]
    work[0] *= rng.uniform(0.05, 0.5)
    work[-1] *= rng.uniform(0.5, 4)
    data: dict[str, Any] = {
        "format": "hetpipe.profile/1",
        "model": "made-up",
        "sequence_length": 64,
        "dtype": rng.choice(["float32", "float32", "bfloat16-autocast"]),
        "layers": layers,
        "kinds": {kind: _kind(rng, work, sizes) for kind in kinds},
    }
    if rng.random() < 0.3:
        pair = f"{kinds[0]}>{kinds[-1]}"
        data["links"] = {pair: {"latency_s": 2e-4, "bandwidth_bytes_per_s": rng.uniform(1, 20) * GBIT}}
    return data


def _kind(rng: random.Random, work: Sequence[float], sizes: Sequence[int]) -> dict[str, Any]:
    slower, fixed, backward = 6 ** rng.random(), rng.uniform(0, 0.5), rng.uniform(1.7, 2.3)
    forward = [[slower * layer_s * (fixed + size) / 3 for size in sizes] for layer_s in work]
    layers = [{"forward_s": row, "backward_s": [backward * value for value in row]} for row in forward]
    return {
        "source": "measured",
        "microbatch_sizes": list(sizes),
        "layers": layers,
        "optimizer_s_per_byte": rng.choice([0.0, 1e-11, 1e-10]),
    }


def _cluster(
    rng: random.Random, profile: Mapping[str, Any], num_devices: int, memory: str, *, slow: bool
) -> tuple[str, list[str]]:
    """Return cluster.toml's text, and the names of the devices."""
    states = sum(4 * layer["parameter_bytes"] for layer in profile["layers"])
    whole = states + 4 * sum(layer["saved_bytes_per_sample"] for layer in profile["layers"])
    kinds = list(profile["kinds"])
    sizes = {kind: whole * rng.uniform(*MEMORY[memory]) for kind in kinds}
    least = (
        1.4 * (whole + states) / 2 / num_devices
    )  # of an average device: else hardly any problem has a plan
    heaviest = max(
        4 * layer["parameter_bytes"] + 8 * layer["saved_bytes_per_sample"] for layer in profile["layers"]
    )
    least = max(least, 1.5 * heaviest) if num_devices > 4 else least
    sizes = {kind: max(value, least * rng.uniform(0.8, 1.5)) for kind, value in sizes.items()}
    gbit = 10 ** (rng.uniform(-0.5, 0.5) if slow else rng.uniform(1, 2))
    lines = ['name = "made-up"', 'reserve = "5 %"', _channel("network", gbit, rng.choice([0, 50, 500]))]
    names: list[str] = []
    most = rng.choice([1, 2, 4]) if num_devices < MANY else 8
    nodes = 0
    while len(names) < num_devices:
        count = min(rng.randint(1, most) if num_devices < MANY else most, num_devices - len(names))
        kind = kinds[nodes % len(kinds)]
        speed = rng.choice([1.0, 1.0, 0.5]) if num_devices < MANY else 1.0
        lines += ["[[nodes]]", f'name = "n{nodes}"', "devices = ["]
        lines += [
            f'  {{ kind = "{kind}", speed = {speed!r}, memory = "{sizes[kind]:.0f} B", count = {count} }},',
            "]",
        ]
        if num_devices >= MANY or rng.random() < 0.7:
            lines.append(_channel("nodes.interconnect", 200.0, 10))
        names += [f"n{nodes}/{index}" for index in range(count)]
        nodes += 1
    if nodes > 2 and rng.random() < 0.3:
        lines += ["[[links]]", 'nodes = ["n0", "n1"]', 'bandwidth = "40 Gbit/s"', 'latency = "5 us"']
    return "\n".join(lines) + "\n", names


def _channel(key: str, gbit: float, microseconds: int) -> str:
    return f'[{key}]\nbandwidth = "{gbit:.4f} Gbit/s"\nlatency = "{microseconds} us"'
