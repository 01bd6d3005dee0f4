"""Published facts of common accelerators, for kinds of device that are not at hand to be measured."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cost_model.errors import InputError
from cost_model.strict_files import did_you_mean


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What its maker says of one kind of device.

    peak_flops: dense multiply-and-add rate in FLOP/s by dtype: "float32" (no tensor cores), and where there
        are tensor cores "tf32", "float16" and "bfloat16", accumulated in float32 as torch does.
    interconnect: what it is attached by; interconnect_bytes_per_s is one direction, all lanes or bricks.
    watts: board power. price_per_hour: US dollars on demand where a cloud rents a single one, else None.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    interconnect: str
    interconnect_bytes_per_s: float
    watts: float
    year: int
    price_per_hour: float | None = None

    def peak(self, dtype: str) -> tuple[float, bool]:
        """Return FLOP/s of matrix multiplications in a dtype, and whether tensor cores do them.

        Where there are none for the dtype, multiplications run at the float32 rate: P100's and P40's
        measured float16 layers are as slow as their float32 ones, whatever the datasheet says of float16.
        """
        if dtype != "float32" and dtype in self.peak_flops:
            return self.peak_flops[dtype], True
        return self.peak_flops["float32"], False


_LINKS = {  # one direction, bytes/s
    "PCIe 3": 15.75e9,  # x16; PCI-SIG, PCI Express Base 3.0, 2010
    "PCIe 4": 31.5e9,  # x16; 4.0, 2017
    "PCIe 4 x8": 15.75e9,
    "PCIe 5": 63e9,  # x16; 5.0, 2019
    "NVLink 1": 80e9,  # 4 links; NVIDIA P100 whitepaper, 2016
    "NVLink 2": 150e9,  # 6 links; NVIDIA V100 whitepaper, 2017
    "NVLink 3": 300e9,  # 12 links; NVIDIA A100 whitepaper, 2020
    "NVLink A800": 200e9,  # 8 links of NVLink 3
    "NVLink 4": 450e9,  # 18 links; NVIDIA H100 whitepaper, 2022
    "NVLink bridge": 300e9,  # NVIDIA H100 NVL datasheet, 2023: 600 GB/s both ways
}

# name | aliases | GiB | GB/s | TFLOP/s float32, tf32, 16 bit (-: no tensor cores, +: bfloat16 too) | link | W
# | year | $/h
# Sources are beside each row; prices: AWS (us-east-1) or Google Cloud (us-central1) on demand, as of 2024.
# Memory, GB/s, rates, link and W were compared in 2026 with these documents as others quote them, not
# with the originals; what was not found quoted is "not checked against a datasheet". Rates of tensor
# cores are dense: half of what is published with sparsity. "From cores x clock": 128 FLOP per tensor core
# and cycle of the boost clock in 16 bit, 64 in tf32, as in the GA102 and Ada whitepapers' RTX 3090 and
# 4090. Memory is GiB, even where the maker writes GB.
_TABLE = """
K80         | Tesla K80                                  | 12 | 240  | 4.37 -    -      | PCIe 3    | 150 | 2014 | 0.90 # NVIDIA Tesla K80 board specification, 2015, one of its two GPUs; p2.xlarge; link not checked against a datasheet
GTX-1080-Ti | NVIDIA GeForce GTX 1080 Ti                 | 11 | 484  | 11.3 -    -      | PCIe 3    | 250 | 2017 | - # NVIDIA GTX 1080 Ti product page, 2017; float32 and watts TechPowerUp; link not checked against a datasheet
Titan-Xp    | NVIDIA TITAN Xp                            | 12 | 548  | 12.1 -    -      | PCIe 3    | 250 | 2017 | - # NVIDIA TITAN Xp product page, 2017, which rounds float32 to 12; link not checked against a datasheet
P4000       | NVIDIA Quadro P4000                        | 8  | 243  | 5.3  -    -      | PCIe 3    | 105 | 2017 | - # NVIDIA Quadro P4000 datasheet, 2017; not checked against it
P40         | Tesla P40                                  | 24 | 346  | 11.8 -    -      | PCIe 3    | 250 | 2016 | - # NVIDIA Tesla P40 datasheet, 2016, which rounds float32 to 12
P100-PCIE   | Tesla P100-PCIE-16GB, P100                 | 16 | 732  | 9.3  -    -      | PCIe 3    | 250 | 2016 | 1.46 # NVIDIA Tesla P100 PCIe datasheet, 2016; Google Cloud, the GPU without its machine
P100-PCIE-12GB | Tesla P100-PCIE-12GB                    | 12 | 549  | 9.3  -    -      | PCIe 3    | 250 | 2016 | - # NVIDIA Tesla P100 PCIe datasheet, 2016; not checked against it
P100-SXM2   | Tesla P100-SXM2-16GB                       | 16 | 732  | 10.6 -    -      | NVLink 1  | 300 | 2016 | - # NVIDIA Tesla P100 datasheet, 2016; its whitepaper has 720 GB/s
V100-SXM2-16GB | Tesla V100-SXM2-16GB, V100, V100-16     | 16 | 900  | 15.7 -    125    | NVLink 2  | 300 | 2017 | 3.06 # NVIDIA V100 datasheet, 2018; p3.2xlarge
V100-SXM2-32GB | Tesla V100-SXM2-32GB, V100-32           | 32 | 900  | 15.7 -    125    | NVLink 2  | 300 | 2018 | - # NVIDIA V100 datasheet, 2018
V100-PCIE-16GB | Tesla V100-PCIE-16GB                    | 16 | 900  | 14.0 -    112    | PCIe 3    | 250 | 2017 | - # NVIDIA V100 datasheet, 2018
V100-PCIE-32GB | Tesla V100-PCIE-32GB                    | 32 | 900  | 14.0 -    112    | PCIe 3    | 250 | 2018 | - # NVIDIA V100 datasheet, 2018
V100S-PCIE-32GB | Tesla V100S-PCIE-32GB, V100S           | 32 | 1134 | 16.4 -    130    | PCIe 3    | 250 | 2019 | - # NVIDIA V100 datasheet, 2020; not checked against it
Titan-V     | NVIDIA TITAN V                             | 12 | 653  | 14.9 -    119    | PCIe 3    | 250 | 2017 | - # NVIDIA TITAN V product page, 2017: 110 with tensor cores, here cores x clock as float32; link not checked against a datasheet
T4          | Tesla T4                                   | 16 | 320  | 8.1  -    65     | PCIe 3    | 70  | 2018 | 0.526 # NVIDIA T4 product page, 2018: "320+" GB/s, 300 in later datasheets; g4dn.xlarge
RTX-2060    | NVIDIA GeForce RTX 2060                    | 6  | 336  | 6.45 -    25.8   | PCIe 3    | 160 | 2019 | - # TechPowerUp; tensor rate from cores x clock
RTX-2080    | NVIDIA GeForce RTX 2080                    | 8  | 448  | 10.1 -    40.3   | PCIe 3    | 215 | 2018 | - # NVIDIA Turing whitepaper, 2018, reference clocks; memory and watts TechPowerUp
RTX-2080-Ti | NVIDIA GeForce RTX 2080 Ti                 | 11 | 616  | 13.4 -    53.8   | PCIe 3    | 250 | 2018 | - # NVIDIA Turing whitepaper, 2018, reference clocks; link and watts not checked against a datasheet
Titan-RTX   | NVIDIA TITAN RTX                           | 24 | 672  | 16.3 -    130    | PCIe 3    | 280 | 2018 | - # NVIDIA TITAN RTX product page, 2018; memory and watts TechPowerUp
Quadro-RTX-6000 | NVIDIA Quadro RTX 6000                 | 24 | 672  | 16.3 -    130.5  | PCIe 3    | 260 | 2018 | - # NVIDIA Quadro RTX 6000 datasheet, 2019; watts TechPowerUp (board 295); link not checked against a datasheet
Quadro-RTX-8000 | NVIDIA Quadro RTX 8000                 | 48 | 672  | 16.3 -    130.5  | PCIe 3    | 260 | 2018 | - # NVIDIA Quadro RTX 8000 datasheet, 2018; memory, link and watts not checked against a datasheet
A100-PCIE-40GB | NVIDIA A100-PCIE-40GB                   | 40 | 1555 | 19.5 156  312+   | PCIe 4    | 250 | 2020 | - # NVIDIA A100 datasheet, 2020
A100-SXM4-40GB | NVIDIA A100-SXM4-40GB, A100, A100-40    | 40 | 1555 | 19.5 156  312+   | NVLink 3  | 400 | 2020 | 3.673 # NVIDIA A100 datasheet, 2020; a2-highgpu-1g
A100-PCIE-80GB | NVIDIA A100 80GB PCIe                   | 80 | 1935 | 19.5 156  312+   | PCIe 4    | 300 | 2021 | - # NVIDIA A100 80GB datasheet, 2021
A100-SXM4-80GB | NVIDIA A100-SXM4-80GB, A100-80          | 80 | 2039 | 19.5 156  312+   | NVLink 3  | 400 | 2020 | 5.07 # NVIDIA A100 80GB datasheet, 2021; a2-ultragpu-1g
A800-SXM4-80GB | NVIDIA A800-SXM4-80GB, A800             | 80 | 2039 | 19.5 156  312+   | NVLink A800 | 400 | 2022 | - # an A100 80 GB with 8 of its 12 links; not checked against a datasheet
A30         | NVIDIA A30                                 | 24 | 933  | 10.3 82   165+   | PCIe 4    | 165 | 2021 | - # NVIDIA A30 datasheet, 2021; link not checked against a datasheet
A40         | NVIDIA A40                                 | 48 | 696  | 37.4 74.8 149.7+ | PCIe 4    | 300 | 2020 | - # NVIDIA A40 datasheet, 2021
A10         | NVIDIA A10                                 | 24 | 600  | 31.2 62.5 125+   | PCIe 4    | 150 | 2021 | - # NVIDIA A10 datasheet, 2021; tf32 not checked against a datasheet
A10G        | NVIDIA A10G                                | 24 | 600  | 35   35   70+    | PCIe 4    | 300 | 2021 | 1.006 # NVIDIA A10G datasheet for AWS, 2021; g5.xlarge
A6000       | NVIDIA RTX A6000                           | 48 | 768  | 38.7 77.4 154.8+ | PCIe 4    | 300 | 2020 | - # NVIDIA RTX A6000 datasheet, 2020
A5000       | NVIDIA RTX A5000                           | 24 | 768  | 27.8 55.6 111.1+ | PCIe 4    | 230 | 2021 | - # NVIDIA RTX A5000 datasheet, 2021; GB/s and link not checked against a datasheet
A4000       | NVIDIA RTX A4000                           | 16 | 448  | 19.2 38.3 76.7+  | PCIe 4    | 140 | 2021 | - # NVIDIA RTX A4000 datasheet, 2021
RTX-3060    | NVIDIA GeForce RTX 3060                    | 12 | 360  | 12.7 12.7 25.5+  | PCIe 4    | 170 | 2021 | - # TechPowerUp; tensor rates from cores x clock
RTX-3070    | NVIDIA GeForce RTX 3070                    | 8  | 448  | 20.3 20.3 40.6+  | PCIe 4    | 220 | 2020 | - # TechPowerUp; tensor rates from cores x clock; link not checked against a datasheet
RTX-3080    | NVIDIA GeForce RTX 3080                    | 10 | 760  | 29.8 29.8 59.5+  | PCIe 4    | 320 | 2020 | - # NVIDIA announcement, 2020; tensor rates from cores x clock; link not checked against a datasheet
RTX-3080-Ti | NVIDIA GeForce RTX 3080 Ti                 | 12 | 912  | 34.1 34.1 68.2+  | PCIe 4    | 350 | 2021 | - # all but memory and GB/s not checked against a datasheet
RTX-3090    | NVIDIA GeForce RTX 3090                    | 24 | 936  | 35.6 35.6 71+    | PCIe 4    | 350 | 2020 | - # NVIDIA GA102 whitepaper, 2020
RTX-3090-Ti | NVIDIA GeForce RTX 3090 Ti                 | 24 | 1008 | 40   40   80+    | PCIe 4    | 450 | 2022 | - # TechPowerUp; tensor rates from cores x clock
RTX-4060-Ti | NVIDIA GeForce RTX 4060 Ti                 | 8  | 288  | 22.1 22.1 44.1+  | PCIe 4 x8 | 160 | 2023 | - # TechPowerUp; tensor rates from cores x clock
RTX-4070    | NVIDIA GeForce RTX 4070                    | 12 | 504  | 29.1 29.1 58.3+  | PCIe 4    | 200 | 2023 | - # TechPowerUp; tensor rates from cores x clock
RTX-4080    | NVIDIA GeForce RTX 4080                    | 16 | 717  | 48.7 48.7 97.5+  | PCIe 4    | 320 | 2022 | - # TechPowerUp; tensor rates from cores x clock
RTX-4090    | NVIDIA GeForce RTX 4090                    | 24 | 1008 | 82.6 82.6 165.2+ | PCIe 4    | 450 | 2022 | - # NVIDIA Ada whitepaper, 2022
L4          | NVIDIA L4                                  | 24 | 300  | 30.3 60   121+   | PCIe 4    | 72  | 2023 | 0.805 # NVIDIA L4 datasheet, 2023; g6.xlarge
L40         | NVIDIA L40                                 | 48 | 864  | 90.5 90.5 181+   | PCIe 4    | 300 | 2022 | - # NVIDIA L40 datasheet, 2023: half the tensor rates of an L40S, though the same chip
L40S        | NVIDIA L40S                                | 48 | 864  | 91.6 183  362+   | PCIe 4    | 350 | 2023 | 1.861 # NVIDIA L40S datasheet, 2023; g6e.xlarge
RTX-6000-Ada | NVIDIA RTX 6000 Ada Generation            | 48 | 960  | 91.1 182  364+   | PCIe 4    | 300 | 2022 | - # NVIDIA RTX 6000 Ada datasheet, 2022: 1457 at 8 bit with sparsity; tf32 half of 16 bit
H100-PCIE   | NVIDIA H100 PCIe                           | 80 | 2000 | 51   378  756+   | PCIe 5    | 350 | 2022 | - # NVIDIA H100 datasheet, 2022, and H100 PCIe product brief, 2022
H100-SXM5   | NVIDIA H100 80GB HBM3, H100, H100-SXM      | 80 | 3350 | 67   494  989+   | NVLink 4  | 700 | 2022 | - # NVIDIA H100 datasheet, 2023
H100-NVL    | NVIDIA H100 NVL                            | 94 | 3900 | 60   418  835+   | NVLink bridge | 400 | 2023 | - # NVIDIA H100 NVL datasheet, 2023; 3938 GB/s in its product brief
H200        | NVIDIA H200, H200-SXM                      | 141 | 4800 | 67  494  989+   | NVLink 4  | 700 | 2024 | - # NVIDIA H200 datasheet, 2023
GH200       | NVIDIA GH200 480GB, GH200-96GB, GH-96      | 96 | 4000 | 67   494  989+   | NVLink 4  | 700 | 2023 | - # NVIDIA GH200 datasheet, 2023: 450 to 1000 W with Grace; 700 W, as H100, not checked against a datasheet
"""  # noqa: E501


def _row(line: str) -> Accelerator:
    facts, _, _ = line.partition("#")
    name, aliases, gib, bandwidth, rates, link, watts, year, price = (
        part.strip() for part in facts.split("|")
    )
    float32, tf32, half = rates.split()
    peaks = {"float32": float32, "tf32": tf32, "float16": half.rstrip("+")}
    if half.endswith("+"):
        peaks["bfloat16"] = half.rstrip("+")
    return Accelerator(
        name=name,
        aliases=tuple(alias.strip() for alias in aliases.split(",")),
        memory_bytes=float(gib) * 2**30,
        memory_bandwidth_bytes_per_s=float(bandwidth) * 1e9,
        peak_flops={dtype: float(rate) * 1e12 for dtype, rate in peaks.items() if rate != "-"},
        interconnect=link,
        interconnect_bytes_per_s=_LINKS[link],
        watts=float(watts),
        year=int(year),
        price_per_hour=None if price == "-" else float(price),
    )


ACCELERATORS = tuple(_row(line) for line in _TABLE.strip().splitlines())


def _spelling(kind: str) -> str:
    """Strip a name of maker, brand, case and punctuation: "NVIDIA GeForce RTX 3090" is "rtx3090"."""
    text = re.sub(r"\b(nvidia|geforce|tesla|gpu)\b", " ", kind.lower().replace("_", " "))
    return re.sub(r"[^a-z0-9]", "", text)


_BY_SPELLING = {_spelling(word): known for known in ACCELERATORS for word in (known.name, *known.aliases)}


def accelerator(kind: str) -> Accelerator:
    """Return the accelerator of a name as torch, a cloud or a cluster file spells it.

    Raises: InputError with the nearest name if it is not in the catalogue.

    >>> accelerator("NVIDIA GeForce RTX 3090").name, accelerator("rtx3090").name
    ('RTX-3090', 'RTX-3090')
    """
    spelling = _spelling(kind)
    # GeForce and RTX cards are commonly named without "RTX" or "GTX", workstation cards with it
    for candidate in (
        spelling,
        spelling.removeprefix("rtx").removeprefix("gtx"),
        "rtx" + spelling,
        "gtx" + spelling,
    ):
        if candidate in _BY_SPELLING:
            return _BY_SPELLING[candidate]
    names = [known.name for known in ACCELERATORS]
    near = did_you_mean(kind.upper(), names)
    raise InputError(f"the catalogue has no accelerator {kind!r}; {near}")
