# ruff: noqa: E402, E501, E701, F811, F821
# Kept answers to the exercises of chapter 02; `python -m minikv check --audit 02` runs them.

# %% ex-2-1 right: row by row
def padding_costs(prompt_lens, num_output_tokens):
    slots = run = read = 0
    for num_tokens in prompt_lens:
        for _ in range(num_tokens, max(prompt_lens)):
            slots += 1
            run += 1
            read += num_output_tokens - 1
    return [slots, run, read]

# %% ex-2-1 right: the rectangle less what is real, with numpy
def padding_costs(prompt_lens, num_output_tokens):
    import numpy as np

    lens = np.array(prompt_lens)
    pads = lens.size * lens.max() - lens.sum()
    return np.array([pads, pads, pads * (num_output_tokens - 1)])

# %% ex-2-1 right: a sorted copy, tensors
def padding_costs(prompt_lens, num_output_tokens):
    import torch

    *rest, longest = sorted(prompt_lens)
    pads = torch.tensor([longest - n for n in rest]).sum()
    return pads, pads, pads * num_output_tokens - pads

# %% ex-2-1 wrong: padding costs only memory
# says: padding costs more than memory
def padding_costs(prompt_lens, num_output_tokens):
    pads = sum(max(prompt_lens) - n for n in prompt_lens)
    return pads, 0, 0

# %% ex-2-1 wrong: what is masked is not read
# says: a mask comes after the reading
def padding_costs(prompt_lens, num_output_tokens):
    pads = sum(max(prompt_lens) - n for n in prompt_lens)
    return pads, pads, 0

# %% ex-2-1 wrong: a decode step for every output token
# says: a step too many
def padding_costs(prompt_lens, num_output_tokens):
    pads = sum(max(prompt_lens) - n for n in prompt_lens)
    return pads, pads, pads * num_output_tokens

# %% ex-2-1 wrong: pads are run again in every step
# says: a pad is run once
def padding_costs(prompt_lens, num_output_tokens):
    pads = sum(max(prompt_lens) - n for n in prompt_lens)
    return pads, pads * num_output_tokens, pads * (num_output_tokens - 1)

# %% ex-2-1 wrong: pads are run in every decode step
# says: a pad is run once
def padding_costs(prompt_lens, num_output_tokens):
    pads = sum(max(prompt_lens) - n for n in prompt_lens)
    return pads, pads * (num_output_tokens - 1), pads * (num_output_tokens - 1)

# %% ex-2-1 wrong: read once, like written once
# says: not once
def padding_costs(prompt_lens, num_output_tokens):
    pads = sum(max(prompt_lens) - n for n in prompt_lens)
    return pads, pads, pads

# %% ex-2-1 wrong: the whole rectangle
# says: the whole rectangle;
def padding_costs(prompt_lens, num_output_tokens):
    square = len(prompt_lens) * max(prompt_lens)
    return square, square, square * (num_output_tokens - 1)

# %% ex-2-1 wrong: longest less shortest
# says: the padding of one row
def padding_costs(prompt_lens, num_output_tokens):
    pads = max(prompt_lens) - min(prompt_lens)
    return pads, pads, pads * (num_output_tokens - 1)

# %% ex-2-1 wrong: the last prompt is the longest
# says: slots is wrong in
def padding_costs(prompt_lens, num_output_tokens):
    pads = sum(prompt_lens[-1] - n for n in prompt_lens)
    return pads, pads, pads * (num_output_tokens - 1)

# %% ex-2-1 wrong: sorts in place
# says: changed what it was given
def padding_costs(prompt_lens, num_output_tokens):
    prompt_lens.sort()
    pads = sum(prompt_lens[-1] - n for n in prompt_lens)
    return pads, pads, pads * (num_output_tokens - 1)

# %% ex-2-1 wrong: one number for all
# says: must return 3 numbers
def padding_costs(prompt_lens, num_output_tokens):
    return sum(max(prompt_lens) - n for n in prompt_lens)

# %% ex-2-1 wrong: prints
# says: returned None
def padding_costs(prompt_lens, num_output_tokens):
    pads = sum(max(prompt_lens) - n for n in prompt_lens)
    print(pads, pads, pads * (num_output_tokens - 1))

# %% ex-2-1 delegates: the engine's tokens, pads and real ones together
# says: the whole rectangle;
def padding_costs(prompt_lens, num_output_tokens):
    rows, longest = len(prompt_lens), max(prompt_lens)
    scheduler = StaticScheduler(
        ContiguousKVCacheManager(rows, 99, max_model_len=99), max_num_batched_tokens=999
    )
    for i, n in enumerate(prompt_lens):
        scheduler.add(Request(str(i), num_prompt_tokens=n, max_tokens=num_output_tokens))
    scheduled, _ = scheduler.schedule()
    run = sum(entry.num_new_tokens for entry in scheduled)
    return run, run, rows * longest * (num_output_tokens - 1)

# %% ex-2-1 wrong: equal lengths counted once
# says: slots is wrong in
# - for num_tokens in prompt_lens)
# + for num_tokens in set(prompt_lens))

# %% ex-2-1 wrong: twenty decode steps at most
# says: read is wrong in
# - num_output_tokens - 1
# + min(20, num_output_tokens - 1)

# %% ex-2-1-b right: longest first, one by one
def make_batches(prompt_lens, batch_size):
    batches = []
    for i in sorted(range(len(prompt_lens)), key=prompt_lens.__getitem__, reverse=True):
        if not batches or len(batches[-1]) == batch_size:
            batches.append([])
        batches[-1].append(i)
    return batches

# %% ex-2-1-b right: numpy, tuples, the batches shuffled
def make_batches(prompt_lens, batch_size):
    import numpy as np

    batches = np.argsort(prompt_lens).reshape(-1, batch_size)
    return tuple(map(tuple, batches[::-1]))

# %% ex-2-1-b right: the longest with its nearest, again and again, a generator
def make_batches(prompt_lens, batch_size):
    left = set(range(len(prompt_lens)))
    while left:
        top = max(left, key=lambda i: prompt_lens[i])
        near = sorted(left, key=lambda i: prompt_lens[top] - prompt_lens[i])[:batch_size]
        left -= set(near)
        yield near

# %% ex-2-1-b wrong: as they came
# says: in the order they came
def make_batches(prompt_lens, batch_size):
    return [
        list(range(i, i + batch_size)) for i in range(0, len(prompt_lens), batch_size)
    ]

# %% ex-2-1-b wrong: dealt out, so that all batches are alike
# says: mixed evenly
# -     return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
# +     num_batches = len(order) // batch_size
# +     return [order[i::num_batches] for i in range(num_batches)]

# %% ex-2-1-b wrong: the longest with the shortest
# says: a long prompt that shares
def make_batches(prompt_lens, batch_size):
    order = deque(sorted(range(len(prompt_lens)), key=lambda i: prompt_lens[i]))
    batches = []
    while order:
        batch = []
        while len(batch) < batch_size:
            batch.append(order.pop() if len(batch) % 2 == 0 else order.popleft())
        batches.append(batch)
    return batches

# %% ex-2-1-b wrong: sorted by what the length looks like as text
# says: a long prompt that shares
# - prompt_lens[i]
# + str(prompt_lens[i])

# %% ex-2-1-b wrong: lengths, not indices
# says: those are lengths
# - range(len(prompt_lens)), key=lambda i: prompt_lens[i]
# + prompt_lens

# %% ex-2-1-b wrong: a list without batches
# says: a list of lists
def make_batches(prompt_lens, batch_size):
    return sorted(range(len(prompt_lens)), key=lambda i: prompt_lens[i])

# %% ex-2-1-b wrong: each alone, which pads nothing
# says: must be full
def make_batches(prompt_lens, batch_size):
    return [[i] for i in range(len(prompt_lens))]

# %% ex-2-1-b wrong: by equal lengths looked up with index()
# says: each index must stand in one batch
# - sorted(range(len(prompt_lens)), key=lambda i: prompt_lens[i])
# + [prompt_lens.index(n) for n in sorted(prompt_lens)]

# %% ex-2-1-b wrong: the last batch is lost
# says: each index must stand in one batch
# -     return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
# +     return [order[i : i + batch_size] for i in range(0, len(order) - batch_size, batch_size)]

# %% ex-2-1-b wrong: takes from a list that never empties
# says: does not end
def make_batches(prompt_lens, batch_size):
    left, batches = list(range(len(prompt_lens))), []
    while left:
        batches.append(sorted(left, key=lambda i: prompt_lens[i])[:batch_size])
        if len(batches) > 50:
            batches.pop()
    return batches

# %% ex-2-1-b wrong: empties the list it was given
# says: changed what it was given
def make_batches(prompt_lens, batch_size):
    named = sorted((n, i) for i, n in enumerate(prompt_lens))
    prompt_lens.clear()
    return [[i for _, i in named[k : k + batch_size]] for k in range(0, len(named), batch_size)]

# %% ex-2-1-b delegates: the package's static batches take who comes
# says: in the order they came
def make_batches(prompt_lens, batch_size):
    manager = ContiguousKVCacheManager(len(prompt_lens), 99, max_model_len=99)
    scheduler = StaticScheduler(manager, max_num_seqs=batch_size, max_num_batched_tokens=999)
    for i, n in enumerate(prompt_lens):
        scheduler.add(Request(str(i), num_prompt_tokens=n, max_tokens=1))
    batches = []
    while scheduler.has_unfinished_requests:
        scheduled, _ = scheduler.schedule()
        batches.append([int(entry.request.request_id) for entry in scheduled])
        scheduler.update(scheduled, [0] * len(scheduled), 0, len(batches))
    return batches

# %% ex-2-1-b wrong: batches twice as large
# says: one of yours has
# - return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
# + return [order[i : i + 2 * batch_size] for i in range(0, len(order), 2 * batch_size)]

# %% ex-2-2 right: batches, then a heap of rows
def leaving_steps(requests, max_num_seqs):
    static, end = [], -1
    for i in range(0, len(requests), max_num_seqs):
        batch = requests[i : i + max_num_seqs]
        end = max(end + 1, batch[-1][0]) + max(n for _, n in batch) - 1
        static += [end] * len(batch)
    rows, other = [0] * max_num_seqs, []
    for arrival, n in requests:
        start = max(arrival, heapq.heappop(rows))
        heapq.heappush(rows, start + n)
        other.append(start + n - 1)
    return static, other

# %% ex-2-2 right: rows that become free, in a heap
def leaving_steps(requests, max_num_seqs):
    static, free_at = [], 0
    for i in range(0, len(requests), max_num_seqs):
        arrivals, lens = zip(*requests[i : i + max_num_seqs], strict=True)
        free_at = max(free_at, *arrivals) + max(lens)
        static.extend([free_at - 1] * len(lens))
    rows, other = [0] * max_num_seqs, []
    for arrival, n in requests:
        start = max(arrival, heapq.heappop(rows))
        heapq.heappush(rows, start + n)
        other.append(start + n - 1)
    return static, other

# %% ex-2-2 right: both step by step, with numpy arrays
def leaving_steps(requests, max_num_seqs):
    import numpy as np

    def play(may_enter):
        left = np.array([n for _, n in requests])
        leave, inside, line, step = np.full(len(left), -1), [], list(range(len(left))), 0
        while line or inside:
            while line and may_enter(line, inside, step):
                inside.append(line.pop(0))
            left[inside] -= 1
            inside = yield_rows(inside, left, leave, step)
            step += 1
        return leave

    batch = []

    def yield_rows(inside, left, leave, step):
        if batch:  # all or none
            done = inside if all(left[i] <= 0 for i in inside) else []
        else:
            done = [i for i in inside if left[i] == 0]
        leave[done] = step
        return [i for i in inside if i not in done]

    def anew(line, inside, step):
        return len(inside) < max_num_seqs and requests[line[0]][0] <= step

    def together(line, inside, step):
        if not inside:
            batch[:] = line[:max_num_seqs]
        return line[0] in batch and requests[batch[-1]][0] <= step

    other = play(anew)
    return play(together), other

# %% ex-2-2 right: recursion for the batches, a list of rows for the rest
def leaving_steps(requests, max_num_seqs):
    def batches(rest, start):
        if not rest:
            return []
        batch, rest = rest[:max_num_seqs], rest[max_num_seqs:]
        end = max(start, batch[-1][0]) + max(n for _, n in batch) - 1
        return [end for _ in batch] + batches(rest, end + 1)

    rows, other = [[] for _ in range(max_num_seqs)], []
    for arrival, n in requests:
        row = min(rows, key=len)
        row += ["idle"] * (arrival - len(row)) + ["busy"] * n
        other.append(len(row) - 1)
    return [batches(requests, 0), other]

# %% ex-2-2 wrong: the new request waits for the end of the batch
# says: did not have to wait for the end of the batch
def leaving_steps(requests, max_num_seqs):
    static, end = [], -1
    for i in range(0, len(requests), max_num_seqs):
        batch = requests[i : i + max_num_seqs]
        start = max(end + 1, batch[-1][0])
        end = start + max(n for _, n in batch) - 1
        static += [end] * len(batch)
    other, end = [], -1
    while len(other) < len(requests):
        start = max(end + 1, requests[len(other)][0])
        rest = requests[len(other) :][:max_num_seqs]
        batch = [n for arrival, n in rest if arrival <= start]
        end = start + max(batch) - 1
        other += [start + n - 1 for n in batch]
    return static, other

# %% ex-2-2 wrong: iteration-level means leaving early, entering as before
# says: did not have to wait for the end of the batch
def leaving_steps(requests, max_num_seqs):
    static, other, end = [], [], -1
    for i in range(0, len(requests), max_num_seqs):
        batch = requests[i : i + max_num_seqs]
        start = max(end + 1, batch[-1][0])
        end = start + max(n for _, n in batch) - 1
        static += [end] * len(batch)
        other += [start + n - 1 for _, n in batch]
    return static, other

# %% ex-2-2 wrong: continuous batching is a bigger static batch
# says: a bigger static batch is not
def leaving_steps(requests, max_num_seqs):
    static, end = [], -1
    for i in range(0, len(requests), max_num_seqs):
        batch = requests[i : i + max_num_seqs]
        start = max(end + 1, batch[-1][0])
        end = start + max(n for _, n in batch) - 1
        static += [end] * len(batch)
    last = requests[-1][0] + max(n for _, n in requests) - 1
    return static, [last] * len(requests)

# %% ex-2-2 wrong: everybody runs at once
# says: who finds them all taken must wait
def leaving_steps(requests, max_num_seqs):
    static, end = [], -1
    for i in range(0, len(requests), max_num_seqs):
        batch = requests[i : i + max_num_seqs]
        start = max(end + 1, batch[-1][0])
        end = start + max(n for _, n in batch) - 1
        static += [end] * len(batch)
    return static, [arrival + n - 1 for arrival, n in requests]

# %% ex-2-2 wrong: a static batch lets the finished go
# says: a finished row stays
# from: batches, then a heap of rows
# -         end = max(end + 1, batch[-1][0]) + max(n for _, n in batch) - 1
# -         static += [end] * len(batch)
# +         start = max(end + 1, batch[-1][0])
# +         end = start + max(n for _, n in batch) - 1
# +         static += [start + n - 1 for _, n in batch]

# %% ex-2-2 wrong: the prefill gives no token
# says: n tokens take n steps
# from: batches, then a heap of rows
# -         end = max(end + 1, batch[-1][0]) + max(n for _, n in batch) - 1
# +         end = max(end + 1, batch[-1][0]) + max(n for _, n in batch)
# -         heapq.heappush(rows, start + n)
# -         other.append(start + n - 1)
# +         heapq.heappush(rows, start + n + 1)
# +         other.append(start + n)

# %% ex-2-2 wrong: right with the batches, a prefill without a token with the rows
# says: n tokens take n steps
# from: batches, then a heap of rows
# -         heapq.heappush(rows, start + n)
# -         other.append(start + n - 1)
# +         heapq.heappush(rows, start + n + 1)
# +         other.append(start + n)

# %% ex-2-2 wrong: steps counted from 1
# says: steps count from 0
# from: batches, then a heap of rows
# -     static, end = [], -1
# +     static, end = [], 0
# -         end = max(end + 1, batch[-1][0]) + max(n for _, n in batch) - 1
# +         end = max(end, batch[-1][0]) + max(n for _, n in batch)
# -         start = max(arrival, heapq.heappop(rows))
# -         heapq.heappush(rows, start + n)
# -         other.append(start + n - 1)
# +         end = max(arrival, heapq.heappop(rows)) + n
# +         heapq.heappush(rows, end)
# +         other.append(end)

# %% ex-2-2 wrong: a row is taken anew in the step in which it is left
# says: not earlier
# from: batches, then a heap of rows
# -     static, end = [], -1
# +     static, end = [], 0
# - end + 1
# + end
# -         start = max(arrival, heapq.heappop(rows))
# -         heapq.heappush(rows, start + n)
# -         other.append(start + n - 1)
# +         end = max(arrival, heapq.heappop(rows)) + n - 1
# +         heapq.heappush(rows, end)
# +         other.append(end)

# %% ex-2-2 wrong: arrivals are overlooked
# says: nobody is computed before it arrives
# from: batches, then a heap of rows
# -     for arrival, n in requests:
# -         start = max(arrival, heapq.heappop(rows))
# -         heapq.heappush(rows, start + n)
# -         other.append(start + n - 1)
# +     for _, n in requests:
# +         end = heapq.heappop(rows) + n
# +         heapq.heappush(rows, end)
# +         other.append(end - 1)

# %% ex-2-2 wrong: a static batch starts with whoever is there
# says: here a batch waits until
def leaving_steps(requests, max_num_seqs):
    static, end = [], -1
    while len(static) < len(requests):
        start = max(end + 1, requests[len(static)][0])
        rest = requests[len(static) :][:max_num_seqs]
        batch = [n for arrival, n in rest if arrival <= start]
        end = start + max(batch) - 1
        static += [end] * len(batch)
    rows, other = [0] * max_num_seqs, []
    for arrival, n in requests:
        end = max(arrival, heapq.heappop(rows)) + n
        heapq.heappush(rows, end)
        other.append(end - 1)
    return static, other

# %% ex-2-2 wrong: pairs, one for each request
# says: two lists of steps
def leaving_steps(requests, max_num_seqs):
    return [(n - 1, arrival + n - 1) for arrival, n in requests]

# %% ex-2-2 wrong: takes requests out of the list it was given
# says: changed what it was given
def leaving_steps(requests, max_num_seqs):
    other = []
    while requests:
        arrival, n = requests.pop(0)
        other.append(arrival + n - 1)
    return other, other

# %% ex-2-2 wrong: nobody can enter before somebody has arrived, and the step stands still
# says: does not end
def leaving_steps(requests, max_num_seqs):
    waiting, step, leave = deque(requests), 0, []
    while waiting:
        if waiting[0][0] <= step and len(leave) < max_num_seqs:
            arrival, n = waiting.popleft()
            leave.append(arrival + n - 1)
    return leave, leave

# %% ex-2-2 wrong: the two lists in each other's place
# says: that list is the iteration-level one
# from: batches, then a heap of rows
# -         start = max(arrival, heapq.heappop(rows))
# -         heapq.heappush(rows, start + n)
# -         other.append(start + n - 1)
# -     return static, other
# +         end = max(arrival, heapq.heappop(rows)) + n
# +         heapq.heappush(rows, end)
# +         other.append(end - 1)
# +     return other, static

# %% ex-2-2 wrong: one list only
# says: two lists of steps
def leaving_steps(requests, max_num_seqs):
    return [arrival + n - 1 for arrival, n in requests]

# %% ex-2-2 delegates: the package's schedulers, each request's own last token
# says: hands the work to the check
def leaving_steps(requests, max_num_seqs):
    return tuple(
        [request.token_runs[-1][1] for request in serve(kind, requests, max_num_seqs)[0]]
        for kind in (StaticScheduler, Scheduler)
    )

# %% ex-2-2 delegates: the package's schedulers, which take whoever is there
# says: here a batch waits until
def leaving_steps(requests, max_num_seqs):
    out = []
    for kind in (StaticScheduler, Scheduler):
        manager = ContiguousKVCacheManager(max_num_seqs, 99, max_model_len=99)
        scheduler = kind(manager, max_num_seqs=max_num_seqs)
        made = [
            Request(str(i), num_prompt_tokens=1, max_tokens=n) for i, (_, n) in enumerate(requests)
        ]
        queue, step = deque(zip(requests, made, strict=True)), 0
        while queue or scheduler.has_unfinished_requests:
            while queue and queue[0][0][0] <= step:
                scheduler.add(queue.popleft()[1])
            scheduled, _ = scheduler.schedule()
            scheduler.update(scheduled, [0] * len(scheduled), step, step)
            step += 1
        out.append([request.finish_time for request in made])
    return out

# %% ex-2-2 right: arrays
# - return static, iteration_level
# + import numpy as np
# +
# +     return np.array([static, iteration_level])

# %% ex-2-2 wrong: who arrives at a step waits for the next
# says: steps count from 0
# - <= step
# + < step

# %% ex-2-3 right: one sum for each
def account(running, slab_slots, pool_slots):
    live = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in running)
    reserved = sum(r.final_output_tokens - r.num_output_tokens for r in running)
    held = len(running) * slab_slots
    return live, reserved, held - live - reserved, pool_slots - held

# %% ex-2-3 right: a slot at a time, unpacked
def account(running, slab_slots, pool_slots):
    counts = {"live": 0, "reserved": 0, "internal": 0}
    for prompt, out, _, final in running:
        for slot in range(slab_slots):
            if slot < prompt + out - 1:
                counts["live"] += 1
            elif slot < prompt + final - 1:
                counts["reserved"] += 1
            else:
                counts["internal"] += 1
    return [*counts.values(), pool_slots - sum(counts.values())]

# %% ex-2-3 right: columns of an array
def account(running, slab_slots, pool_slots):
    import numpy as np

    prompt, out, _, final = np.array(running).T
    live, end = (prompt + out - 1).sum(), (prompt + final - 1).sum()
    held = slab_slots * len(running)
    return np.array([live, end - live, held - end, pool_slots - held])

# %% ex-2-3 wrong: the token just sampled has its slot already
# says: the token just sampled
# from: one sum for each
# - - 1 for
# + for

# %% ex-2-3 wrong: only prompts have K and V
# says: as well as the prompt's
def account(running, slab_slots, pool_slots):
    live = sum(r.num_prompt_tokens for r in running)
    reserved = sum(r.final_output_tokens - 1 for r in running)
    held = len(running) * slab_slots
    return live, reserved, held - live - reserved, pool_slots - held

# %% ex-2-3 wrong: reserved is what max_tokens allows
# says: is what was allowed
# from: one sum for each
# - r.final_output_tokens
# + r.max_tokens

# %% ex-2-3 wrong: free slots are internal
# says: free slots belong to no slab
def account(running, slab_slots, pool_slots):
    live = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in running)
    reserved = sum(r.final_output_tokens - r.num_output_tokens for r in running)
    free = pool_slots - len(running) * slab_slots
    return live, reserved, pool_slots - live - reserved, free

# %% ex-2-3 wrong: all of a slab's rest is reserved
# says: what never is, is internal
def account(running, slab_slots, pool_slots):
    live = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in running)
    held = len(running) * slab_slots
    return live, held - live, 0, pool_slots - held

# %% ex-2-3 wrong: the last output token takes a slot
# says: it never takes a slot
def account(running, slab_slots, pool_slots):
    live = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in running)
    end = sum(r.num_prompt_tokens + r.final_output_tokens for r in running)
    held = len(running) * slab_slots
    return live, end - live, held - end, pool_slots - held

# %% ex-2-3 wrong: reserved counted from the beginning
# says: live ones are counted already
def account(running, slab_slots, pool_slots):
    live = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in running)
    end = sum(r.num_prompt_tokens + r.final_output_tokens - 1 for r in running)
    held = len(running) * slab_slots
    return live, end, held - end, pool_slots - held

# %% ex-2-3 wrong: what is not live is internal
# says: will be used later is reserved
# from: one sum for each
# - live - reserved
# + live

# %% ex-2-3 wrong: what nobody has written is free
# says: free to nobody else
# from: one sum for each
# -     return live, reserved, held - live - reserved, pool_slots - held
# +     return live, reserved, held - live - reserved, pool_slots - live

# %% ex-2-3 wrong: free slabs
# says: not slabs
# from: one sum for each
# - - held
# + // slab_slots - len(running)

# %% ex-2-3 wrong: a remainder that makes no slab is not free
# says: free is wrong in
# from: one sum for each
# -     return live, reserved, held - live - reserved, pool_slots - held
# +     whole = pool_slots // slab_slots * slab_slots
# +     return live, reserved, held - live - reserved, whole - held

# %% ex-2-3 wrong: one token just sampled, however many run
# says: live is wrong in
# from: one sum for each
# -     live = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in running)
# +     live = sum(r.num_prompt_tokens + r.num_output_tokens for r in running) - 1

# %% ex-2-3 wrong: in another order
# says: the order is
# from: one sum for each
# - reserved, held - live -
# + held - live - reserved,

# %% ex-2-3 wrong: three of the four
# says: must return 4 numbers
def account(running, slab_slots, pool_slots):
    live = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in running)
    reserved = sum(r.final_output_tokens - r.num_output_tokens for r in running)
    return live, reserved, len(running) * slab_slots - live - reserved

# %% ex-2-3 wrong: shares
# says: live is wrong in
# from: one sum for each
# -     return live, reserved, held - live - reserved, pool_slots - held
# +     counts = live, reserved, held - live - reserved, pool_slots - held
# +     return [count / pool_slots for count in counts]

# %% ex-2-3 delegates: the manager's report, which does not know how long answers become
# says: is what was allowed
def account(running, slab_slots, pool_slots):
    manager = ContiguousKVCacheManager(pool_slots, 1, max_model_len=slab_slots)
    for i, r in enumerate(running):
        request = Request(str(i), num_prompt_tokens=r.num_prompt_tokens, max_tokens=r.max_tokens)
        manager.allocate_slots(request, r.num_prompt_tokens)
        request.num_computed_tokens = r.num_prompt_tokens + r.num_output_tokens - 1
    report = manager.report()
    return report.live, report.reserved, report.internal, report.free

# %% ex-2-3 wrong: never as many as allowed
# says: reserved is wrong in
# - request.num_prompt_tokens + request.final_output_tokens - 1
# + request.num_prompt_tokens + min(request.final_output_tokens, request.max_tokens - 1) - 1

# %% ex-2-3 wrong: requests that are alike counted once
# says: live is wrong in
# - for request in running:
# + for request in set(running):

# %% ex-2-3 right: a callable without a name
from functools import partial


def counts(unused, running, slab_slots, pool_slots):
    live = sum(r[0] + r[1] - 1 for r in running)
    used = sum(r[0] + r[3] - 1 for r in running)
    held = slab_slots * len(running)
    return live, used - live, held - used, pool_slots - held


account = partial(counts, "x")

# %% ex-2-4 right: running ones ask, too; filtered by hand
class MyScheduler(Scheduler):
    def schedule(self):
        out, used = [], 0
        for request in self.running:
            num_new_tokens = request.num_tokens - request.num_computed_tokens
            assert self.manager.allocate_slots(request, num_new_tokens) is not None
            out.append(ScheduledRequest(request=request, num_new_tokens=num_new_tokens))
            used += num_new_tokens
        for request in list(self.waiting):
            room = len(self.running) < self.max_num_seqs
            prompt = request.num_prompt_tokens
            if not room or used + prompt > self.max_num_batched_tokens:
                break
            if not self.manager.allocate_slots(request, prompt):
                break
            self.waiting.remove(request)
            self.running.append(request)
            out.append(ScheduledRequest(request, prompt))
            used += prompt
        return out, []

# %% ex-2-4 right: new ones first in the list, one helper, numpy's whole numbers
class MyScheduler(Scheduler):
    def room_for_first(self, budget):
        if not self.waiting or len(self.running) + 1 > self.max_num_seqs:
            return False
        first = self.waiting[0]
        if first.num_tokens > budget:
            return False
        return self.manager.allocate_slots(first, first.num_tokens) is not None

    def schedule(self):
        import numpy as np

        old = [ScheduledRequest(request, np.int64(1)) for request in self.running]
        budget, new = self.max_num_batched_tokens - len(old), []
        while self.room_for_first(budget):
            request = self.waiting.popleft()
            self.running.append(request)
            new.insert(0, ScheduledRequest(request, np.int64(request.num_tokens)))
            budget -= request.num_tokens
        return tuple(new + old), ()

# %% ex-2-4 right: decide on paper first, then move
class MyScheduler(Scheduler):
    def schedule(self):
        tokens = dict.fromkeys(self.running, 1)
        for request in list(self.waiting)[: self.max_num_seqs - len(self.running)]:
            if sum(tokens.values()) + request.num_tokens > self.max_num_batched_tokens:
                break
            if self.manager.allocate_slots(request, request.num_tokens) is None:
                break
            tokens[self.waiting.popleft()] = request.num_tokens
        self.running = list(tokens)
        return [ScheduledRequest(*item) for item in tokens.items()], []

# %% ex-2-4 wrong: the new request waits for a free row at the end of the batch
# says: need not wait for the end of the batch
class MyScheduler(Scheduler):
    def schedule(self):
        scheduled = [ScheduledRequest(request, 1) for request in self.running]
        budget = self.max_num_batched_tokens
        if not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs:
                request = self.waiting[0]
                if request.num_tokens > budget:
                    break
                if self.manager.allocate_slots(request, request.num_tokens) is None:
                    break
                self.running.append(self.waiting.popleft())
                scheduled.append(ScheduledRequest(request, request.num_tokens))
                budget -= request.num_tokens
        return scheduled, []

# %% ex-2-4 wrong: takes requests out of the line that it goes through
# says: can't go on once somebody is taken out
# -         while self.waiting and len(self.running) < self.max_num_seqs:
# -             request = self.waiting[0]
# -             if request.num_tokens > budget:
# +         for request in self.waiting:
# +             if request.num_tokens > budget or len(self.running) >= self.max_num_seqs:

# %% ex-2-4 wrong: continuous batching is a bigger batch: all who wait
# says: is not a bigger batch
# - len(self.running) < self.max_num_seqs
# + self.waiting[0].num_tokens <= budget
# -             request = self.waiting[0]
# -             if request.num_tokens > budget:
# -                 break
# +             request = self.waiting[0]

# %% ex-2-4 wrong: one request at a time
# says: all who fit come in
class MyScheduler(Scheduler):
    def schedule(self):
        if self.running:
            return [ScheduledRequest(self.running[0], 1)], []
        request = self.waiting.popleft()
        self.manager.allocate_slots(request, request.num_tokens)
        self.running.append(request)
        return [ScheduledRequest(request, request.num_tokens)], []

# %% ex-2-4 wrong: one newcomer per step
# says: all who fit come in
class MyScheduler(Scheduler):
    def schedule(self):
        scheduled = [ScheduledRequest(request, 1) for request in self.running]
        budget = self.max_num_batched_tokens - len(scheduled)
        if self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            fits = request.num_tokens <= budget
            if fits and self.manager.allocate_slots(request, request.num_tokens) is not None:
                self.running.append(self.waiting.popleft())
                scheduled.append(ScheduledRequest(request, request.num_tokens))
        return scheduled, []

# %% ex-2-4 wrong: prompts first, those who run must wait
# says: but computes nothing
# -         scheduled = [ScheduledRequest(request, 1) for request in self.running]
# -         budget = self.max_num_batched_tokens - len(scheduled)
# +         scheduled, budget = [], self.max_num_batched_tokens
# -         return scheduled, []
# +         return scheduled or [ScheduledRequest(request, 1) for request in self.running], []

# %% ex-2-4 wrong: the whole sequence runs again
# says: has one token to compute
# -         scheduled = [ScheduledRequest(request, 1) for request in self.running]
# +         scheduled = [ScheduledRequest(request, request.num_tokens) for request in self.running]

# %% ex-2-4 wrong: the budget is for prompts alone
# says: count together
# - self.max_num_batched_tokens - len(scheduled)
# + self.max_num_batched_tokens

# %% ex-2-4 wrong: every prompt for itself against the budget
# says: count together
# -         scheduled = [ScheduledRequest(request, 1) for request in self.running]
# -         budget = self.max_num_batched_tokens - len(scheduled)
# +         scheduled = [ScheduledRequest(request, 1) for request in self.running]
# -             if request.num_tokens > budget:
# +             if request.num_tokens > self.max_num_batched_tokens:
# -             scheduled.append(ScheduledRequest(request, request.num_tokens))
# -             budget -= request.num_tokens
# +             scheduled.append(ScheduledRequest(request, request.num_tokens))

# %% ex-2-4 wrong: a budget that may not be used up
# says: fills the budget exactly
# -             if request.num_tokens > budget:
# +             if request.num_tokens >= budget:

# %% ex-2-4 wrong: one row too many
# says: is not a bigger batch
# -         while self.waiting and len(self.running) < self.max_num_seqs:
# +         while self.waiting and len(self.running) <= self.max_num_seqs:

# %% ex-2-4 wrong: whoever fits comes in
# says: overtook
# -         while self.waiting and len(self.running) < self.max_num_seqs:
# -             request = self.waiting[0]
# -             if request.num_tokens > budget:
# -                 break
# +         for request in list(self.waiting):
# +             if request.num_tokens > budget or len(self.running) == self.max_num_seqs:
# +                 continue
# -             self.running.append(self.waiting.popleft())
# +             self.waiting.remove(request)
# +             self.running.append(request)

# %% ex-2-4 wrong: last come, first served
# says: overtook
# -             request = self.waiting[0]
# +             request = self.waiting[-1]
# -             self.running.append(self.waiting.popleft())
# +             self.running.append(self.waiting.pop())

# %% ex-2-4 wrong: who does not fit goes to the back of the line
# says: keep their order
class MyScheduler(Scheduler):
    def schedule(self):
        scheduled = [ScheduledRequest(request, 1) for request in self.running]
        budget = self.max_num_batched_tokens - len(scheduled)
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.popleft()
            if request.num_tokens > budget:
                self.waiting.append(request)
                break
            if self.manager.allocate_slots(request, request.num_tokens) is None:
                self.waiting.append(request)
                break
            self.running.append(request)
            scheduled.append(ScheduledRequest(request, request.num_tokens))
            budget -= request.num_tokens
        return scheduled, []

# %% ex-2-4 wrong: who does not fit is lost
# says: must stay in self.waiting
class MyScheduler(Scheduler):
    def schedule(self):
        scheduled = [ScheduledRequest(request, 1) for request in self.running]
        budget = self.max_num_batched_tokens - len(scheduled)
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.popleft()
            if request.num_tokens > budget:
                break
            if self.manager.allocate_slots(request, request.num_tokens) is None:
                break
            self.running.append(request)
            scheduled.append(ScheduledRequest(request, request.num_tokens))
            budget -= request.num_tokens
        return scheduled, []

# %% ex-2-4 wrong: None is overlooked
# says: scheduled without slots
# -             if self.manager.allocate_slots(request, request.num_tokens) is None:
# -                 break
# +             self.manager.allocate_slots(request, request.num_tokens)

# %% ex-2-4 wrong: nobody asks the manager
# says: scheduled without slots
class MyScheduler(Scheduler):
    def schedule(self):
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.running.append(self.waiting.popleft())
        return [ScheduledRequest(r, r.num_tokens - r.num_computed_tokens) for r in self.running], []

# %% ex-2-4 wrong: slots first, budget after
# says: ask for slots last
# -             request = self.waiting[0]
# +             request = self.waiting[0]
# +             if self.manager.allocate_slots(request, request.num_tokens) is None:
# +                 break
# -             if request.num_tokens > budget:
# -                 break
# -             if self.manager.allocate_slots(request, request.num_tokens) is None:
# +             if request.num_tokens > budget:

# %% ex-2-4 wrong: never taken out of the line, an endless loop
# says: does not end
class MyScheduler(Scheduler):
    def schedule(self):
        scheduled = [ScheduledRequest(request, 1) for request in self.running]
        budget = self.max_num_batched_tokens - len(scheduled)
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            fits = request.num_tokens <= budget
            if fits and self.manager.allocate_slots(request, request.num_tokens) is not None:
                scheduled.append(ScheduledRequest(request, request.num_tokens))
        return scheduled, []

# %% ex-2-4 wrong: an endless loop that swallows every error
# says: does not end
class MyScheduler(Scheduler):
    def schedule(self):
        while True:
            try:
                if len(self.running) > self.max_num_seqs:
                    return [], []
            except Exception:
                continue

# %% ex-2-4 wrong: an endless loop on one line, which has no lines to count
# says: does not end
class MyScheduler(Scheduler):
    def schedule(self):
        while True: pass

# %% ex-2-4 wrong: left in the waiting line
# says: still stands in
# -         while self.waiting and len(self.running) < self.max_num_seqs:
# -             request = self.waiting[0]
# -             if request.num_tokens > budget:
# +         for request in self.waiting:
# +             if len(self.running) == self.max_num_seqs or request.num_tokens > budget:
# - self.waiting.popleft()
# + request

# %% ex-2-4 wrong: newcomers compute their prompt and a token
# says: scheduled twice
# -         scheduled = [ScheduledRequest(request, 1) for request in self.running]
# -         budget = self.max_num_batched_tokens - len(scheduled)
# +         scheduled, budget = [], self.max_num_batched_tokens - len(self.running)
# -             budget -= request.num_tokens
# +             budget -= request.num_tokens
# +         scheduled += [ScheduledRequest(request, 1) for request in self.running]

# %% ex-2-4 wrong: the budget is counted down in the scheduler itself
# says: must stay as they are
# - budget = self.max_num_batched_tokens -
# + self.max_num_batched_tokens -=
# -             if request.num_tokens > budget:
# +             if request.num_tokens > self.max_num_batched_tokens:
# -             budget -= request.num_tokens
# +             self.max_num_batched_tokens -= request.num_tokens

# %% ex-2-4 wrong: asks for one slot, whatever the prompt
# says: a slab hides the difference
# -             if self.manager.allocate_slots(request, request.num_tokens) is None:
# +             if self.manager.allocate_slots(request, 1) is None:

# %% ex-2-4 wrong: never put among the running
# says: is not in self.running
# -         while self.waiting and len(self.running) < self.max_num_seqs:
# +         while self.waiting and len(scheduled) < self.max_num_seqs:
# -             self.running.append(self.waiting.popleft())
# +             self.waiting.popleft()

# %% ex-2-4 wrong: counts the tokens itself
# says: only decides
# -             budget -= request.num_tokens
# +             budget -= request.num_tokens
# +             request.num_computed_tokens += request.num_tokens

# %% ex-2-4 wrong: the line is never empty
# says: ended in IndexError
# - self.waiting and len(self.running) < self.max_num_seqs
# + len(self.running) < self.max_num_seqs and self.waiting[0].num_tokens <= budget
# -             request = self.waiting[0]
# -             if request.num_tokens > budget:
# -                 break
# +             request = self.waiting[0]

# %% ex-2-4 wrong: one list
# says: must return two things
class MyScheduler(Scheduler):
    def schedule(self):
        return [ScheduledRequest(request, 1) for request in self.running]

# %% ex-2-4 wrong: plain pairs
# says: must return two things
class MyScheduler(Scheduler):
    def schedule(self):
        request = self.waiting.popleft()
        return [(request, request.num_tokens)], []

# %% ex-2-4 wrong: returns nothing
# says: returned None
class MyScheduler(Scheduler):
    def schedule(self):
        self.scheduled = [ScheduledRequest(request, 1) for request in self.running]

# %% ex-2-4 wrong: in two lists, the running ones in the second
# says: nobody has to step back
# -         scheduled = [ScheduledRequest(request, 1) for request in self.running]
# -         budget = self.max_num_batched_tokens - len(scheduled)
# +         old = [ScheduledRequest(request, 1) for request in self.running]
# +         budget, new = self.max_num_batched_tokens - len(old), []
# -             scheduled.append(ScheduledRequest(request, request.num_tokens))
# +             new.append(ScheduledRequest(request, request.num_tokens))
# - scheduled, []
# + new, old

# %% ex-2-4 delegates: the package's scheduler, which cuts prompts
# says: was cut
class MyScheduler(Scheduler):
    def schedule(self):
        return super().schedule()

# %% ex-2-4 delegates: the package's static batches
# says: neither runs nor waits
class MyScheduler(StaticScheduler):
    pass

# %% ex-2-4 wrong: four newcomers at most
# says: all who fit come in
# -             budget -= request.num_tokens
# +             budget -= request.num_tokens
# +             if len(scheduled) == 4:
# +                 break

# %% ex-2-4 wrong: an __init__ without the inherited one
# says: MyScheduler ended in TypeError
# - def schedule(self):
# + def __init__(self, *args, **options):
# +         self.steps = 0
# +
# +     def schedule(self):

# %% ex-2-4 wrong: None for the second list
# says: must return two things
# - return scheduled, []
# + return scheduled, None

# %% ex-2-5 right: a sum over the requests
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    useful = sum(min(sum(n == name for n, _ in chart), output_lens[name]) for name in output_lens)
    steps = 1 + max(step for _, step in chart)
    offered = max_num_seqs * steps
    return offered - useful, useful / offered, useful / (steps * seconds_per_step)

# %% ex-2-5 right: which pairs are useful, in order of their steps
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    left, tokens = dict(output_lens), 0
    for name, _ in sorted(chart, key=lambda pair: pair[1]):
        if left[name]:
            left[name] -= 1
            tokens += 1
    last = max(step for _, step in chart)
    total = (last + 1) * max_num_seqs
    return total - tokens, tokens / total, tokens / ((last + 1) * seconds_per_step)

# %% ex-2-5 right: a table, rows and steps, with numpy
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    import numpy as np

    names = list(output_lens)
    table = np.zeros((len(names), 1 + max(step for _, step in chart)), dtype=int)
    for name, step in chart:
        table[names.index(name), step] = 1
    age = table.cumsum(axis=1)
    useful = table * (age <= np.array(list(output_lens.values()))[:, None])
    offered = max_num_seqs * table.shape[1]
    rate = useful.sum(axis=0).mean() / seconds_per_step
    return np.array([offered - useful.sum(), useful.sum() / offered, rate])

# %% ex-2-5 right: waste counted in two parts
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    from collections import Counter

    steps = max(chart, key=lambda pair: pair[1])[1] + 1
    dead = sum(
        max(0, pairs - output_lens[name]) for name, pairs in Counter(n for n, _ in chart).items()
    )
    empty = max_num_seqs * steps - len(chart)
    share = 1 - (dead + empty) / (max_num_seqs * steps)
    return [dead + empty, share, share * max_num_seqs / seconds_per_step]

# %% ex-2-5 wrong: utilisation of the rows that were computed
# says: numerator and denominator do not match
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    useful = sum(min(sum(n == name for n, _ in chart), output_lens[name]) for name in output_lens)
    steps = 1 + max(step for _, step in chart)
    return max_num_seqs * steps - useful, useful / len(chart), useful / (steps * seconds_per_step)

# %% ex-2-5 wrong: utilisation over requests instead of rows
# says: numerator and denominator do not match
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    useful = sum(min(sum(n == name for n, _ in chart), output_lens[name]) for name in output_lens)
    steps = 1 + max(step for _, step in chart)
    share = useful / (len(output_lens) * steps)
    return max_num_seqs * steps - useful, share, useful / (steps * seconds_per_step)

# %% ex-2-5 wrong: utilisation in rows per step
# says: numerator and denominator do not match
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    useful = sum(min(sum(n == name for n, _ in chart), output_lens[name]) for name in output_lens)
    steps = 1 + max(step for _, step in chart)
    return max_num_seqs * steps - useful, useful / steps, useful / (steps * seconds_per_step)

# %% ex-2-5 wrong: whatever is computed is used
# says: is not yet used
# from: a sum over the requests
# -     return offered - useful, useful / offered, useful / (steps * seconds_per_step)
# +     return offered - useful, len(chart) / offered, useful / (steps * seconds_per_step)

# %% ex-2-5 wrong: throughput counted with pads
# says: counted with pads
# from: a sum over the requests
# -     return offered - useful, useful / offered, useful / (steps * seconds_per_step)
# +     return offered - useful, useful / offered, len(chart) / (steps * seconds_per_step)

# %% ex-2-5 wrong: only rows after their end are wasted
# says: empty rows are wasted, too
# from: a sum over the requests
# -     return offered - useful, useful / offered, useful / (steps * seconds_per_step)
# +     return len(chart) - useful, useful / offered, useful / (steps * seconds_per_step)

# %% ex-2-5 wrong: only empty rows are wasted
# says: only the empty rows
# from: a sum over the requests
# -     return offered - useful, useful / offered, useful / (steps * seconds_per_step)
# +     return offered - len(chart), useful / offered, useful / (steps * seconds_per_step)

# %% ex-2-5 wrong: everybody got what was asked for
# says: still to come
# from: a sum over the requests
# - min(sum(n == name for n, _ in chart), output_lens[name]) for name in output_lens
# + output_lens.values()

# %% ex-2-5 wrong: steps in which nothing ran are left out
# says: nothing ran take time
# from: a sum over the requests
# -     steps = 1 + max(step for _, step in chart)
# +     steps = len({step for _, step in chart})

# %% ex-2-5 wrong: the last step's number is the number of steps
# says: there were s + 1
# from: a sum over the requests
# -     steps = 1 + max(step for _, step in chart)
# +     steps = max(step for _, step in chart)

# %% ex-2-5 wrong: the last pair of the list is the last step
# says: wasted is wrong in
# from: a sum over the requests
# - max(step for _, step in chart)
# + chart[-1][1]

# %% ex-2-5 wrong: the prefill gives no token
# says: its prefill, gives a token
# from: a sum over the requests
# -     useful = sum(min(sum(n == name for n, _ in chart), output_lens[name]) for name in output_lens)
# +     useful = 0
# +     for name in {name for name, _ in chart}:
# +         useful += min(sum(n == name for n, _ in chart), output_lens[name]) - 1

# %% ex-2-5 wrong: seconds per row
# says: not per row
# from: a sum over the requests
# -     return offered - useful, useful / offered, useful / (steps * seconds_per_step)
# +     return offered - useful, useful / offered, useful / (offered * seconds_per_step)

# %% ex-2-5 wrong: tokens per step
# says: were asked for, not per step
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    useful = sum(min(sum(n == name for n, _ in chart), output_lens[name]) for name in output_lens)
    steps = 1 + max(step for _, step in chart)
    return max_num_seqs * steps - useful, useful / (max_num_seqs * steps), useful / steps

# %% ex-2-5 wrong: in percent
# says: that is a percentage
# from: a sum over the requests
# -     return offered - useful, useful / offered, useful / (steps * seconds_per_step)
# +     return offered - useful, 100 * useful / offered, useful / (steps * seconds_per_step)

# %% ex-2-5 wrong: rounded
# says: don't round
# from: a sum over the requests
# -     return offered - useful, useful / offered, useful / (steps * seconds_per_step)
# +     rate = useful / (steps * seconds_per_step)
# +     return offered - useful, round(useful / offered, 2), round(rate, 2)

# %% ex-2-5 wrong: a sentence
# says: must return 3 numbers
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    return f"{len(chart)} rows"

# %% ex-2-5 wrong: sorts the chart it was given
# says: changed what it was given
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    chart.sort(key=lambda pair: pair[1])
    steps = chart[-1][1] + 1
    return max_num_seqs * steps - len(chart), 0.5, 1.0

# %% ex-2-5 delegates: the package's metrics, which count rows and not what came of them
# says: is not yet used
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    from minikv.metrics import StepRecord

    steps = 1 + max(step for _, step in chart)
    records = []
    for step in range(steps):
        rows = sum(at == step for _, at in chart)
        start, end = step * seconds_per_step, (step + 1) * seconds_per_step
        records.append(StepRecord(start, end, rows, rows, 0))
    useful = sum(min(sum(n == name for n, _ in chart), output_lens[name]) for name in output_lens)
    share = sum(record.num_seqs for record in records) / (max_num_seqs * steps)
    return max_num_seqs * steps - useful, share, useful / records[-1].end

# %% ex-2-5 wrong: rows of the busiest step
# says: also where no step takes all of them
# - offered = max_num_seqs * num_steps
# + at = [step for _, step in chart]
# +     offered = max(map(at.count, at)) * num_steps

# %% ex-2-5 wrong: no more rows than requests
# says: also where no step takes all of them
# - offered = max_num_seqs * num_steps
# + offered = min(max_num_seqs, len(output_lens)) * num_steps

# %% ex-2-5 right: numbers of 32 bits
# - return offered - useful, useful / offered, useful / (num_steps * seconds_per_step)
# + import numpy as np
# +
# +     rate = useful / (num_steps * seconds_per_step)
# +     return np.array([offered - useful, useful / offered, rate], dtype=np.float32)
