"""The inner loops of the bound of pipelines made of runs, compiled."""

import numpy as np

from partition.estimates.arrays import Bools, Floats, Places, Singles
from partition.estimates.compiled import compiled

EXACT = 1 - 1e-6  # of seconds that are needed, for rounding, in single precision too


@compiled
def stage_seconds(
    times: tuple[Floats, Floats, Floats, Floats], after_s: Floats, samples: int, size: int
) -> tuple[Floats, Floats]:
    """Return the least seconds of stages for some samples in microbatches of a size, by [start, stop].

    From a first forward to a last backward, and to the end of the last forward. times: `options_s`, `caps`,
    `backs_s` and `forward_s` of `node_samples.LayerTimes`, whose `after_s` is the other.
    """
    options_s, caps, backs_s, forward_s = times
    places = len(forward_s)
    busy_s, arrived_s = np.empty((places, places)), np.empty((places, places))
    full = max(1, samples // size)
    for start in range(places):
        for stop in range(places):
            least_s, soonest_s = np.inf, np.inf
            for again in range(2):
                option_s = options_s[again, start, stop]
                if option_s == np.inf:
                    continue
                most, work_s = max(caps[again, start, stop], 1.0), samples * option_s
                done_s = work_s - most * backs_s[again, start, stop]
                if caps[again, start, stop] >= full - 1:  # all wait at once, and one more
                    most, done_s = full + 1.0, -np.inf
                least_s = min(least_s, max(work_s, full * (size * option_s + after_s[stop]) / most))
                soonest_s = min(soonest_s, done_s)
            busy_s[start, stop] = least_s
            arrived_s[start, stop] = max(samples * forward_s[start, stop], soonest_s)
    return busy_s, arrived_s


@compiled
def fill_needed(
    need: Singles,
    ways: Floats,
    stages_s: Floats,
    arrivals_s: Floats,
    sums_s: Singles,
    inside_s: Singles,
    limits: tuple[int, int, float],
) -> None:
    """Put in the least seconds of runs for some samples: [start, stop, devices, what].

    A dynamic programme over the cuts of a run:

        state       (devices, start, stop): the first stages of a run from `start` on
        label       the most seconds of a stage, of one kind
        transition  one more stage, behind the others, that is in time
        complexity  devices x layers^3 x kinds of seconds, less what is not in time

    what: 0, the run's forwards in front of a stage, its work, and the run's backwards of the stages in front
    of it; then for each row of sums, forwards, work, and these backwards or the sums of the run up to the
    stage that its last backward leaves over, or its own ones out of its device, whichever takes longest;
    last, from the first forward of the run to the end of the last one. inf where no run is in time.

    ways: of the layers in front of each place: last backward at the most, forward, backward, optimizer,
    forward of the last microbatch. stages_s: of stages, from a first forward to a last backward; arrivals_s:
    to the end of the last forward. sums_s: by [row, start, stop]. inside_s: in which the gradients of layers
    leave a device, by [start, stop]. limits: (devices of a node, first layers that are asked for, step).
    """
    last, forward, backward, optimizer, ending = ways
    num_layers, rows, (width, starts, step_s) = len(last) - 1, len(sums_s), limits
    need[:starts] = np.inf
    stage_s = np.zeros(rows + 1, np.float32)
    out_s = np.zeros((num_layers + 1, num_layers + 1))  # what is left of a stage's own sums
    first = np.full(num_layers + 1, num_layers)  # place of the longest stage in time, by its end
    for start in range(num_layers):
        for stop in range(start + 1, num_layers + 1):
            beyond_s = inside_s[start, stop] - (last[stop - 1] - last[start])
            out_s[start, stop] = max(out_s[start, stop - 1], beyond_s)
            work_s = stages_s[start, stop] + optimizer[stop] - optimizer[start]
            if work_s * EXACT <= step_s:
                first[stop] = min(first[stop], start)
    fewest = np.empty(num_layers + 1, np.int64)  # devices up to a place
    for start in range(starts):
        fewest[:] = width
        for stop in range(start + 1, num_layers + 1):
            # the last stage begins at each place, or alone where there is one device
            for place in range(stop - 1 if width > 1 else start, max(start, first[stop]) - 1, -1):
                if place > start and fewest[place] >= width:
                    continue
                work_s = stages_s[place, stop] + optimizer[stop] - optimizer[place]
                if work_s == np.inf:
                    break  # a longer stage does not fit either
                ahead_s = forward[place] - forward[start]
                back_s = backward[place] - backward[start]
                own_s = (ahead_s + work_s + back_s) * EXACT
                if own_s > step_s:
                    continue
                stage_s[0] = own_s
                behind_s = last[stop - 1] - last[place]
                for row in range(rows):
                    left_s = max(back_s, sums_s[row, start, stop] - behind_s, out_s[place, stop])
                    stage_s[row + 1] = (ahead_s + work_s + left_s) * EXACT
                arrives_s = (ahead_s + arrivals_s[place, stop]) * EXACT
                if place == start:
                    need[start, stop, 1, : rows + 1] = stage_s
                    need[start, stop, 1, -1] = arrives_s
                    fewest[stop] = 1
                    continue
                fewest[stop] = min(fewest[stop], fewest[place] + 1)
                pass_s = (ending[stop] - ending[place]) * EXACT
                for devices in range(fewest[place] + 1, min(width, stop - start) + 1):
                    before, here = need[start, place, devices - 1], need[start, stop, devices]
                    for what in range(rows + 1):
                        here[what] = min(here[what], max(stage_s[what], before[what]))
                    here[-1] = min(here[-1], max(arrives_s, before[-1] + pass_s))


@compiled
def late_s(ways: Floats, stages_s: Floats, need: Singles, width: int, left_s: float) -> Singles:
    """Return the least seconds of runs up to the last layer, with sums to come behind it: [devices, start].

    As `fill_needed`, whose runs without sums are given. Behind the last backward of the last layer come those
    of the other layers of its stage, and beside them left_s of sums.
    """
    last, forward, backward, optimizer = ways
    stop = len(last) - 1
    late = np.full((need.shape[2], stop + 1), np.inf, np.float32)
    for start in range(stop):
        for place in range(stop - 1 if width > 1 else start, start - 1, -1):
            work_s = stages_s[place, stop] + optimizer[stop] - optimizer[place]
            if work_s == np.inf:
                break  # a longer stage does not fit either
            beside_s = max(backward[place] - backward[start], left_s - (last[stop - 1] - last[place]))
            own_s = (forward[place] - forward[start] + work_s + beside_s) * EXACT
            if place == start:
                late[1, start] = own_s
                continue
            for devices in range(2, min(width, stop - start) + 1):
                both_s = max(own_s, need[start, place, devices - 1])
                late[devices, start] = min(late[devices, start], both_s)
    return late


@compiled
def least_price(
    kinds: Floats,
    parts: Floats,
    shares: Floats,
    need: Singles,
    late: Singles,
    ways: Floats,
    sums_s: Singles,
    inside_s: Singles,
    runs_s: Floats,
    open_runs: Bools,
    links_s: Floats,
    limits: Floats,
) -> tuple[float, Places]:
    """Return the least price of a pipeline for some samples, and its runs; inf if none is below a limit.

    A dynamic programme over runs, from the first layer on:

        state       (layer, whether they have not passed the node that all pipelines pass, or have, or end
                    there, bucket of `arrived`, bucket of `ahead` and `tail`): the runs in front of the layer
        label       the least of each of: price; ahead, the forwards of the first microbatch; tail, from the
                    end of the last backward behind the runs to the end of the step; arrived, when the last
                    microbatch's forward is there. So labels of a bucket bound all its pipelines
        transition  a run (kind of node, share of its sums, devices, stop) that is in time
        complexity  layers^2 x buckets x kinds x shares x devices, less what is dearer than the limit with the
                    least that may come behind it

    kinds: by [kind, what], price of a device, of a second of the card, of a second of sums, devices of a
    node, and whether it is the node that all pipelines pass. parts: of its sums that a run pays for, by
    [kind, devices], rising. shares: by [least and most, which], how many times its bytes a run's sums move.
    need, late: `fill_needed` and `late_s` by [kind, ...]. ways: by [kind, what, place], of the layers in
    front of a place, forward, backward, forward of the last microbatch. sums_s: by [kind, share, start,
    stop], at the least; inside_s: in which gradients leave a single device, by [kind, start, stop].
    runs_s: by [what, kind, start, stop], the price of the samples of a run, and seconds on the card of
    its bytes that others sum, too, and of those that it may have for itself. open_runs: those that a kind
    may have. links_s: of a message in front of each layer, forward, backward, forward of the last
    microbatch; and from there to the end of the model and back, at the least.
    limits: (step, price, buckets, buckets of `arrived`, whether there is a node that all pass, seconds of
    sums behind the last backward of the last layer).
    Runs come back by [start, stop, kind, devices, share] from the last one on.
    """
    num_layers = ways.shape[2] - 1
    step_s, limit, buckets, late_buckets = limits[0], limits[1], int(limits[2]), int(limits[3])
    left_s = limits[5]
    first_flag = 0 if limits[4] > 0 else 1
    behind, fewest = _least_behind(kinds, parts, shares, need, runs_s, open_runs, step_s)
    each_flag = late_buckets * (buckets + 1)
    path = np.full((num_layers + 1, 3 * each_flag, 4), np.inf)  # price, ahead, tail, arrived
    came = np.full((num_layers + 1, 3 * each_flag, 5), -1)  # start, state, kind, devices, share
    path[0, first_flag * each_flag] = 0.0
    for start in range(num_layers):
        for state in range(3 * each_flag):
            price, ahead_s, tail_s, arrived_s = path[start, state]
            flag = state // each_flag
            if price + behind[min(flag, 1), start] >= limit:
                continue
            for kind in range(len(kinds)):
                each, card, sums, width, passed = kinds[kind]
                if passed > 0 and flag == 2:
                    continue  # it would be one run
                to_flag = 2 if passed > 0 else min(flag, 1)
                forward, backward, ending = ways[kind]
                for share in range(shares.shape[1]):
                    if share > 0 and sums <= card:
                        break  # more sums only cost more
                    moved = shares[1 if sums > card else 0, share]
                    paid, free = card * moved + sums * (2 - moved), 2 * min(card, sums)
                    for stop in range(start + 1, num_layers + 1):
                        if not open_runs[kind, start, stop]:
                            continue
                        bytes_s = paid * runs_s[1, kind, start, stop] + free * runs_s[2, kind, start, stop]
                        base = price + runs_s[0, kind, start, stop] + behind[min(to_flag, 1), stop]
                        if base + each >= limit:
                            continue
                        on_s = ahead_s + forward[stop] - forward[start]
                        back_s = tail_s + backward[stop] - backward[start]
                        back_s = max(back_s, sums_s[kind, share, start, stop])
                        if stop == num_layers:
                            back_s = max(back_s, left_s)
                        onward_s = arrived_s + (ending[stop] - ending[start]) * EXACT
                        most = min(int(width), stop - start)
                        for devices in range(fewest[kind, share, start, stop], most + 1):
                            total = base + devices * each + parts[kind, devices] * bytes_s
                            if total >= limit:
                                break
                            if (
                                need[kind, start, stop, devices, 0] + ahead_s + tail_s > step_s
                                or need[kind, start, stop, devices, share + 1] + ahead_s > step_s
                            ):
                                continue
                            if stop == num_layers and late[kind, devices, start] + ahead_s > step_s:
                                continue
                            there_s = max(onward_s, ahead_s + need[kind, start, stop, devices, -1])
                            tail_after_s = max(back_s, inside_s[kind, start, stop] / devices)
                            if (there_s + links_s[3, stop] + tail_after_s) * EXACT > step_s:
                                continue
                            reached_s, gone_s, here_s = on_s, tail_after_s, there_s
                            if stop < num_layers:
                                reached_s += links_s[0, stop]
                                gone_s += links_s[1, stop]
                                here_s += links_s[2, stop]
                            into = int((reached_s + gone_s) / step_s * buckets)
                            if into > buckets:
                                continue
                            into += min(int(here_s / step_s * late_buckets), late_buckets - 1) * (buckets + 1)
                            into += to_flag * each_flag
                            total -= behind[min(to_flag, 1), stop]
                            label = path[stop, into]
                            if total < label[0]:
                                label[0] = total
                                came[stop, into] = (start, state, kind, devices, share)
                            label[1] = min(label[1], reached_s)
                            label[2] = min(label[2], gone_s)
                            label[3] = min(label[3], here_s)
                            if there_s <= onward_s and tail_after_s == back_s:
                                break  # more devices only cost more
    best = each_flag + int(path[num_layers, each_flag:, 0].argmin())
    least_found = path[num_layers, best, 0]
    runs, at, count = np.zeros((num_layers, 5), np.int64), num_layers, 0
    while at > 0 and least_found < np.inf:
        start, state, kind, devices, share = came[at, best]
        runs[count] = (start, at, kind, devices, share)
        at, best, count = start, state, count + 1
    return least_found, runs[:count]


@compiled
def _least_behind(
    kinds: Floats,
    parts: Floats,
    shares: Floats,
    need: Singles,
    runs_s: Floats,
    open_runs: Bools,
    step_s: float,
) -> tuple[Floats, Places]:
    """Return the least price from each layer on, by [whether the node that all pass is in front, layer].

    And the fewest devices of each run, if nothing is in front of it, by [kind, share, start, stop].
    """
    num_kinds, num_layers, num_shares = len(kinds), open_runs.shape[1] - 1, shares.shape[1]
    behind = np.full((2, num_layers + 1), np.inf)
    behind[1, num_layers] = 0.0
    fewest = np.full((num_kinds, num_shares, num_layers + 1, num_layers + 1), num_layers + 1)
    for start in range(num_layers - 1, -1, -1):
        for kind in range(num_kinds):
            each, card, sums, width, passed = kinds[kind]
            for share in range(num_shares if sums > card else 1):
                moved = shares[1 if sums > card else 0, share]
                paid, free = card * moved + sums * (2 - moved), 2 * min(card, sums)
                for stop in range(start + 1, num_layers + 1):
                    if not open_runs[kind, start, stop]:
                        continue
                    found = num_layers + 1
                    for devices in range(1, min(int(width), stop - start) + 1):
                        if (
                            need[kind, start, stop, devices, 0] <= step_s
                            and need[kind, start, stop, devices, share + 1] <= step_s
                        ):
                            found = devices
                            break
                    if found > num_layers:
                        continue
                    fewest[kind, share, start, stop] = found
                    bytes_s = paid * runs_s[1, kind, start, stop] + free * runs_s[2, kind, start, stop]
                    price = runs_s[0, kind, start, stop] + found * each + parts[kind, found] * bytes_s
                    behind[1, start] = min(behind[1, start], price + behind[1, stop])
                    other = behind[1, stop] if passed > 0 else behind[0, stop]
                    behind[0, start] = min(behind[0, start], price + other)
    return behind, fewest
