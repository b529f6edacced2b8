"""A scheduler that runs one step at a time and adds everything up in every step, to compare with kvcalc.simulation.

It follows the same sources as `kvcalc.simulation.replicas.mixed` and `prefill_first`, and shares no code with them but
the rules and the step times. Times are fractions of powers of two, so that sums are exact in either order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from kvcalc.simulation.replicas.rules import Rules


@dataclass
class Job:
    """One request: what is asked, and what happened."""

    arrival: float
    prompt: int
    answer: int
    cached: int = 0
    number: int = 0
    target: int = 0
    blocks: int = 0
    extra: int = 0  # blocks that the prompt needed, and the answer does not
    computed: int = 0
    named: int = 0  # the tokens whose whole blocks can be found again
    outputs: int = 0
    unread: int = 0  # of these, in the step that still runs when the next one is scheduled
    preemptions: int = 0
    started: float | None = None
    first_token: float | None = None
    finish: float | None = None
    sent: float | None = None  # when its cache has arrived at another instance
    tokens_at: list[float] = field(default_factory=list)

    @property
    def known(self) -> int:
        """The tokens of the prompt and of the answer so far."""
        return self.prompt + self.outputs

    @property
    def is_prefilling(self) -> bool:
        """Whether the tokens that were known at the start are not all computed."""
        return self.computed < self.target


Part = tuple[list[int], list[tuple[int, int]]]
"""What a step does for one scheduler: the contexts of the sequences that decode, and the chunks of prompts."""


def serve(
    servers: Sequence[Server], jobs: list[Job], concurrency: int | None, step: Callable[[list[Part]], float],
    route: Callable[[list[Job], Sequence[Server]], None],
) -> None:  # fmt: skip
    """Run schedulers whose steps begin and end together. `route` gives them the jobs that have arrived."""
    coming = list(jobs if concurrency is None else jobs[:concurrency])
    later = [] if concurrency is None else jobs[concurrency:]
    arrived: list[Job] = []
    now, visible, decode_steps, unseen = 0.0, 0.0, 0, 0
    balancer = Balancer(servers)
    while coming or arrived or any(server.waiting or server.running for server in servers):
        while coming and coming[0].arrival <= visible:
            arrived.append(coming.pop(0))
        route(arrived, servers)
        kept = balancer.keep_back()
        plans = [server.plan(is_alone=len(servers) == 1) for server in servers]
        for server, waiting in zip(servers, kept):
            server.waiting += waiting
        if not any(decoding or chunks for decoding, chunks in plans):
            assert all(server.has_let_go for server in servers if server.running)
            if arrived or any(server.has_let_go for server in servers):
                visible = now
            else:
                assert coming
                now = visible = max(now, coming[0].arrival)
            continue
        for server in servers:
            for job in server.running:
                job.started = now if job.started is None else job.started
        # In a step with prompts, SGLang decodes only where no prompt is computed: plan() says so.
        seconds = step([([job.computed + 1 for job in decoding], [c for _, c in chunks]) for decoding, chunks in plans])
        unseen = 0 if any(chunks for _, chunks in plans) else (unseen + 1) % servers[0].rules.schedule.receives_every
        if not unseen:
            visible = now if servers[0].rules.schedule.overlaps else now + seconds
        now += seconds
        decode_steps += any(decoding for decoding, _ in plans)
        for server, (decoding, chunks) in zip(servers, plans):
            for _ in server.apply(decoding, chunks, now):
                if later:
                    following = later.pop(0)
                    following.arrival = now
                    coming.append(following)
            server.decode_steps = decode_steps


class Balancer:
    """TensorRT-LLM's rule for prompts that wait for those of other ranks, step by step."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers, self.rule = servers, servers[0].rules.schedule.balance
        self.waited = self.gathered = 0

    def keep_back(self) -> list[list[Job]]:
        """Take the waiting jobs away from all servers if they may not start in this step."""
        if self.rule is None:
            return []
        decoding = [
            sum(not job.is_prefilling and job.finish is None for job in server.running) for server in self.servers
        ]
        have_places = all(number < server.rules.max_running for number, server in zip(decoding, self.servers))
        is_kept = False
        if have_places and all(server.waiting for server in self.servers):
            self.waited = 0
            if all(decoding):
                is_kept = self.gathered < self.rule.gathering_steps
                self.gathered = self.gathered + 1 if is_kept else 0
        else:
            self.waited += 1
            is_kept = self.waited < self.rule.most_steps and all(decoding)
            if not is_kept:
                self.waited = 0
        if not is_kept:
            return []
        kept = [server.waiting for server in self.servers]
        for server in self.servers:
            server.waiting = []
        return kept


def one_by_one(arrived: list[Job], servers: Sequence[Server]) -> None:
    """All jobs to the only server."""
    servers[0].waiting += arrived
    arrived.clear()


@dataclass
class Server:
    """One scheduler. `units(tokens)` are the blocks of a request, `prompt_units` those while its prompt is computed."""

    rules: Rules
    capacity: int | None
    page: int
    units: Callable[[int], int]
    engine: str
    keeps_blocks: bool = False
    prompt_units: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.chunked: Job | None = None
        self.is_full = False
        ratio = self.rules.schedule.new_tokens
        self.first_ratio, self.least_ratio = (0.0, 0.0) if ratio is None else (ratio.first, ratio.least)
        self.ratio, self.ratio_steps = self.first_ratio, 1 if ratio is None else ratio.steps
        self.decode_steps = 0
        # The requests in slots, and when each slot was used last.
        self.slots_used: list[Job | None] = [None] * self.rules.max_running
        self.last_used = [-1] * self.rules.max_running
        self.releases = 0
        self.most_used = 0
        # With overlap, a step is scheduled before it is known which jobs ended with the one before it.
        self.is_late = self.rules.schedule.overlaps and self.engine != "slots"
        self.leaving: list[Job] = []
        # Jobs that have ended, but hold their blocks until their cache is sent.
        self.sending: list[Job] = []
        self.shrinking: list[Job] = []
        self.has_let_go = False
        # With `keeps_blocks`, blocks of one unit that nothing uses, the next one to go first: (job, place in it).
        self.queue: deque[tuple[int, int] | None] = deque([None] * (self.capacity or 0))

    def plan(self, *, is_alone: bool) -> tuple[list[Job], list[tuple[Job, tuple[int, int]]]]:
        """The jobs that decode in the next step, and the chunks that it computes."""
        plans = {"sglang": self.plan_prefill_first, "slots": self.plan_slots}
        decoding, chunks = plans.get(self.engine, self.plan_mixed)(self.waiting, self.running)
        self.has_let_go = bool(self.leaving or self.shrinking)
        if self.has_let_go:
            new = sum(self.of_prompt(job, end) - self.held(job) for job, (_, end) in chunks)
            self.most_used = max(
                self.most_used, self.used(self.running) + (0 if self.rules.schedule.reserves_answer else new)
            )
        for job in self.leaving:
            self.running.remove(job)
            self.end(job)
        for job in self.shrinking:
            job.extra = 0
        self.is_full = self.is_full and not self.leaving
        self.leaving, self.shrinking = [], []
        if self.has_let_go and not (is_alone or decoding or chunks):
            for job in self.running:
                job.unread = 0
            found = self.plan(is_alone=is_alone)
            self.has_let_go = True
            return found
        if not decoding and not chunks:
            self.ratio = self.ratio if self.has_let_go else self.first_ratio
            for job in self.running:
                job.unread = 0
        return decoding, chunks

    def apply(self, decoding: list[Job], chunks: list[tuple[Job, tuple[int, int]]], now: float) -> Iterator[Job]:
        """A step ends. Gives the jobs that end with it."""
        running = self.running
        for job in running:
            job.unread = 0
        for job in decoding:
            job.unread = self.next_tokens() if self.is_late else 0
            job.named = max(job.target, job.computed) if self.is_late else job.computed + self.next_tokens()
            job.computed += self.next_tokens()
            job.outputs = min(job.outputs + self.next_tokens(), job.answer)
            job.tokens_at.append(now)
        for job, (_, end) in chunks:
            job.computed = job.named = end
            if end == job.known:
                if self.prompt_units is not None:
                    job.extra = self.of_prompt(job, end) - self.units(self.slots(job, end))
                    self.shrinking.append(job)
                job.outputs += 1
                job.unread = int(self.is_late)
                job.tokens_at.append(now)
                job.first_token = now if job.first_token is None else job.first_token
        self.most_used = max(self.most_used, self.used(running))
        if not self.is_late:
            for job in self.shrinking:
                job.extra = 0
            self.shrinking = []
        for job in [job for job in running if job.outputs == job.answer and job.finish is None]:
            job.finish, job.named = now, job.computed
            if self.is_late:
                self.leaving.append(job)
            else:
                running.remove(job)
                self.end(job)
                self.is_full = False
            if job in self.slots_used:
                self.last_used[self.slots_used.index(job)] = self.releases
                self.slots_used[self.slots_used.index(job)] = None
                self.releases += 1
            yield job

    def next_tokens(self) -> int:
        """The tokens that the next decode step gives every sequence."""
        each: Fraction = self.rules.tokens_per_step
        return int((self.decode_steps + 1) * each) - int(self.decode_steps * each)

    def slots(self, job: Job, tokens: int) -> int:
        """The tokens for which a job holds blocks: more if it then decodes and drafts."""
        return tokens + (self.rules.lookahead_tokens if tokens >= job.target else 0)

    def held(self, job: Job) -> int:
        if self.rules.schedule.reserves_answer:
            return self.units(self.slots(job, job.prompt + job.answer))
        if job.is_prefilling:
            return self.of_prompt(job, job.computed)
        return self.units(self.slots(job, job.computed)) + job.extra

    def of_prompt(self, job: Job, tokens: int) -> int:
        return (self.prompt_units or self.units)(self.slots(job, tokens))

    def end(self, job: Job) -> None:
        if self.rules.sends:
            self.sending.append(job)
        else:
            self.give_back(job)

    def free_sent(self, until: float) -> None:
        for job in [job for job in self.sending if job.sent is not None and job.sent <= until]:
            self.sending.remove(job)
            self.give_back(job)

    def used(self, running: list[Job]) -> int:
        return sum(map(self.held, running)) + sum(map(self.held, self.sending))

    def allocate(self, job: Job, tokens: int) -> bool:
        """Take single blocks for the first `tokens` tokens of a job. False if there are too few."""
        needed = self.units(tokens) - job.blocks
        if needed > len(self.queue):
            return False
        for _ in range(needed):
            self.queue.popleft()
        job.blocks += max(needed, 0)
        return True

    def give_back(self, job: Job) -> None:
        """Whole blocks with names go last, the others first."""
        whole = job.named // self.page
        self.queue.extendleft(None for _ in range(whole, job.blocks))
        self.queue.extend((job.number, place) for place in reversed(range(min(whole, job.blocks))))
        job.blocks = job.extra = 0

    def find_own(self, job: Job) -> None:
        """Set the tokens of a preempted job that are still in its old blocks."""
        found = 0
        while (job.number, found) in self.queue:
            found += 1
        job.cached = min(found * self.page, (job.known - 1) // self.page * self.page)

    def take_own(self, job: Job) -> None:
        for place in range(job.cached // self.page):
            self.queue.remove((job.number, place))
            job.blocks += 1
        # What is left of the old blocks is never found again.
        self.queue = deque(None if each and each[0] == job.number else each for each in self.queue)

    def preempt(self, job: Job, running: list[Job]) -> None:
        running.remove(job)
        self.give_back(job)
        job.computed = 0
        job.cached = {"found": job.cached, "nothing": 0, "all": job.known - 1}[self.rules.keeps]
        job.preemptions += 1
        if job in self.leaving:
            self.leaving.remove(job)

    def free(self, running: list[Job]) -> int:
        return 10**18 if self.capacity is None else self.capacity - self.used(running)

    def plan_mixed(self, waiting: list[Job], running: list[Job]) -> tuple[list[Job], list[tuple[Job, tuple[int, int]]]]:
        """Running requests in order, each with blocks for its tokens or the last one preempted; then waiting ones."""
        budget, preempted, each = self.rules.step_tokens, False, self.rules.checked_tokens
        decoding: list[Job] = []
        chunks: list[tuple[Job, tuple[int, int]]] = []
        promised = 0
        place = 0
        while place < len(running) and budget > 0:
            job = running[place]
            if job in self.leaving:
                place += 1
                continue
            tokens = min(budget, job.known - job.computed) if job.is_prefilling else self.next_tokens()
            while not self.rules.schedule.reserves_answer:
                if job.is_prefilling:
                    needed = self.of_prompt(job, job.computed + tokens) - self.held(job)
                else:
                    needed = self.units(self.slots(job, job.computed + tokens)) - self.held(job) + job.extra
                if self.keeps_blocks:
                    if self.allocate(job, self.slots(job, job.computed + tokens)):
                        break
                elif needed <= self.free(running) - promised:
                    promised += needed
                    break
                last = running[-1]
                if last not in self.leaving:
                    waiting.insert(0, last)
                self.preempt(last, running)
                preempted = True
                if last is job:
                    break
            if job not in running:
                break
            if job.is_prefilling:
                chunks.append((job, (job.computed, job.computed + tokens)))
            else:
                decoding.append(job)
            budget -= tokens if job.is_prefilling else each
            place += 1
        while not preempted and waiting and budget > 0 and len(running) < self.rules.max_running:
            job = waiting[0]
            if self.keeps_blocks:
                self.find_own(job)
            tokens = job.known - job.cached
            if not self.rules.schedule.divides and tokens > budget and tokens <= self.rules.step_tokens:
                break
            wanted = job.prompt + job.answer if self.rules.schedule.reserves_answer else job.known
            wanted += self.rules.lookahead_tokens
            if (self.prompt_units or self.units)(wanted) > (
                len(self.queue) if self.keeps_blocks else self.free(running) - promised
            ):
                break
            if self.keeps_blocks:
                self.take_own(job)
            waiting.pop(0)
            running.append(job)
            job.target = job.known
            if self.keeps_blocks:
                assert self.allocate(job, self.slots(job, min(job.known, job.cached + budget)))
            end = min(job.known, job.cached + budget)
            if not self.rules.schedule.reserves_answer:
                promised += self.of_prompt(job, end)
            chunks.append((job, (job.cached, end)))
            budget -= end - job.cached
        return decoding, chunks

    def plan_slots(self, waiting: list[Job], running: list[Job]) -> tuple[list[Job], list[tuple[Job, tuple[int, int]]]]:
        """Waiting requests into free slots; then the tokens of slots that answer, and prompts slot by slot."""
        while waiting and None in self.slots_used:
            job, chosen = waiting.pop(0), -1
            for slot, user in enumerate(self.slots_used):
                if user is None and (chosen < 0 or self.last_used[slot] <= self.last_used[chosen]):
                    chosen = slot
            self.slots_used[chosen] = job
            job.target, job.computed = job.known, job.cached
            running.append(job)
        decoding = [job for job in running if not job.is_prefilling]
        batch, chunks = len(decoding) * self.rules.checked_tokens, []
        for job in filter(None, self.slots_used):
            if not job.is_prefilling:
                continue
            start = end = job.computed
            while end < job.known and batch < self.rules.step_tokens:
                end, batch = end + 1, batch + 1
                if job.known - end in {min(tokens, self.rules.step_tokens) for tokens in self.rules.schedule.part_ends}:
                    break
            if end > start:
                chunks.append((job, (start, end)))
        return decoding, chunks

    def plan_prefill_first(
        self, waiting: list[Job], running: list[Job]
    ) -> tuple[list[Job], list[tuple[Job, tuple[int, int]]]]:
        decoding = [job for job in running if job is not self.chunked and job not in self.leaving]
        if self.rules.sends or self.chunked is not None or not (decoding or self.leaving):
            self.is_full = False
        if self.chunked is not None or (waiting and not self.is_full):
            chunks = self.admit(waiting, running, [*decoding, *self.leaving])
            if chunks:
                left = self.free(running) - sum(self.of_prompt(job, end) - self.held(job) for job, (_, end) in chunks)
                sits_out = not self.rules.schedule.mixes or self.growth(decoding) > left
                return [] if sits_out else decoding, chunks

        def growth() -> int:
            return self.growth(decoding)

        if not decoding or growth() <= self.free(running):
            decay = (self.first_ratio - self.least_ratio) / self.ratio_steps
            self.ratio = max(self.ratio - decay, self.least_ratio) if decoding else self.ratio
            return decoding, []
        if self.leaving:
            return [], []
        decoding.sort(key=lambda j: (j.outputs - j.unread, -j.prompt), reverse=True)
        while len(decoding) > 1:
            job = decoding.pop()
            self.preempt(job, running)
            waiting.append(job)
            # The scheduler throws away what it has not read.
            job.outputs -= job.unread
            if not job.outputs:
                job.first_token = None
                job.tokens_at.clear()
            if growth() <= self.free(running):
                break
        wanted = sum(job.answer for job in decoding)
        known = sum(job.outputs - job.unread for job in decoding)
        self.ratio = min(1.0, (known + 20 * len(decoding)) / (wanted + 1))
        self.is_full = False
        return decoding, []

    def growth(self, decoding: list[Job]) -> int:
        """The blocks that the next tokens of these jobs take."""
        after = [self.units(self.slots(j, j.computed + self.next_tokens())) for j in decoding]
        return sum(after) - sum(map(self.held, decoding))

    def admit(self, waiting: list[Job], running: list[Job], decoding: list[Job]) -> list[tuple[Job, tuple[int, int]]]:
        page = self.page
        more = page + self.rules.lookahead_tokens
        paged = lambda tokens: -(-tokens // page) * page  # noqa: E731
        schedule, chunks = self.rules.schedule, []
        mixed = len(decoding) * self.rules.checked_tokens if schedule.mixes else 0
        chunk_left, total = self.rules.step_tokens - mixed, float(self.free(running) - mixed)
        input_left = (schedule.enough_tokens or 10**9) - mixed
        if chunk_left <= 0:
            return []
        if self.capacity is not None:
            total -= sum(min(j.answer - j.outputs + j.unread, 4096) * self.ratio for j in decoding)

        def add(job: Job, tokens: int) -> None:
            nonlocal chunk_left, input_left, total
            start, is_new = (job.cached, True) if job not in running else (job.computed, False)
            if is_new:
                running.append(job)
                job.target = job.known
            end = start + tokens
            chunks.append((job, (start, end)))
            chunk_left -= paged(tokens)
            input_left -= paged(tokens)
            self.chunked = job if end < job.known else None
            total -= paged(self.slots(job, end)) + page if is_new else paged(tokens) + more
            total -= 0 if self.chunked else min(job.answer, 4096)

        continued = self.chunked
        if self.chunked is not None:
            job = self.chunked
            limit = min(chunk_left, int(total)) if int(total) > 0 else chunk_left
            add(job, min(limit, job.known - job.computed))
        while waiting and chunk_left > 0 and total > 0 and input_left > 0:
            job = waiting[0]
            if self.chunked is not None:
                break
            if len(running) >= self.rules.max_running:
                self.is_full = bool(decoding)
                break
            missed = job.known - job.cached
            if job.known + min(job.answer - job.outputs, 4096) + more >= total:
                self.is_full = bool(decoding)
                break
            tokens = missed if paged(missed) <= chunk_left else chunk_left // page * page
            if not tokens:
                break
            waiting.pop(0)
            add(job, tokens)
        if total <= 0 and (waiting or any(job is not continued for job, _ in chunks)):
            self.is_full = bool(decoding)
        return chunks
