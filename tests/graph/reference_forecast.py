"""Forecast the slow and plain way: sets of resident tensors, brute force over what is to come.

Two walks. The first has no clock: it runs every step, rebuilds by recursion what is demanded, and
writes down each moment and who reads what at it. The second repeats the moments with the clock and
looks at every later moment whenever a copy in might begin.
"""

from dataclasses import dataclass, field

from dynamemo.graph.problem import Problem, Technique


@dataclass
class Moment:
    """One run on the compute stream: a step, or a rebuild in front of it."""

    step: int
    rebuilt: int | None
    elapsed_s: float
    own_bytes: int
    reads: set[int] = field(default_factory=set)


@dataclass
class Result:
    """What the forecast has to agree with."""

    peak_bytes: int
    elapsed_s: float
    stalled_out_s: float
    stalled_in_s: float
    memory: list[int]
    begun: list[tuple[int, int]]


class Reference:
    """Simulate one problem under given techniques."""

    def __init__(self, problem: Problem, techniques: tuple[Technique, ...], budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.technique = [
            technique if tensor.uses else Technique.KEEP
            for tensor, technique in zip(problem.tensors, techniques, strict=True)
        ]
        self.moments: list[Moment] = []
        self._list_moments()
        self.reads = [
            [m for m, moment in enumerate(self.moments) if index in moment.reads]
            for index in range(len(problem.tensors))
        ]

    def _list_moments(self) -> None:
        """Walk without a clock."""
        present: set[int] = set()
        for index, step in enumerate(self.problem.steps):
            own = Moment(index, None, step.elapsed_s, step.own_bytes)
            wanted = [i for i, t in enumerate(self.problem.tensors) if index in t.uses]
            rebuilt: list[int] = []
            for tensor in wanted:
                self._demand(tensor, index, present, rebuilt)
            for tensor in sorted(rebuilt):
                # What a rebuild reads goes after the step at the earliest.
                own.reads |= self._add_rebuild(tensor, index)
            for i, tensor in enumerate(self.problem.tensors):
                if tensor.made_at == index:
                    present.add(i)
                if tensor.made_at <= index <= tensor.last_forward_use or index in tensor.uses:
                    own.reads.add(i)
                if tensor.last_forward_use == index and self.technique[i] != Technique.KEEP:
                    present.discard(i)
            self.moments.append(own)

    def _demand(self, tensor: int, step: int, present: set[int], rebuilt: list[int]) -> None:
        """Make a tensor present, and first what it is rebuilt from."""
        if tensor in present:
            return
        present.add(tensor)
        if self.technique[tensor] == Technique.RECOMPUTE:
            rebuild = self.problem.tensors[tensor].rebuild
            assert rebuild is not None
            for source in rebuild.sources:
                self._demand(source, step, present, rebuilt)
            rebuilt.append(tensor)

    def _add_rebuild(self, tensor: int, step: int) -> set[int]:
        rebuild = self.problem.tensors[tensor].rebuild
        assert rebuild is not None
        own_bytes = self.problem.steps[step].own_bytes + rebuild.transient_bytes
        reads = {tensor, *rebuild.sources}
        self.moments.append(Moment(step, tensor, rebuild.elapsed_s, own_bytes, reads))
        return reads

    def away(self, tensor: int) -> tuple[int, int] | None:
        """Return the last moment before it is away and the first that demands it again."""
        if self.technique[tensor] == Technique.KEEP:
            return None
        end = self.problem.tensors[tensor].last_forward_use
        before = [m for m in self.reads[tensor] if self.moments[m].step <= end]
        # A rebuild in front of its last use in forward reads it while it is still there.
        return max(before), min(m for m in self.reads[tensor] if self.moments[m].step > end)

    def needs(self, tensor: int, moment: int) -> bool:
        """Tell whether it has to be resident at a moment, whatever the link does."""
        reads = self.reads[tensor]
        if not reads or not reads[0] <= moment <= reads[-1]:
            return False
        gap = self.away(tensor)
        return gap is None or not gap[0] < moment < gap[1]

    def level(self, moment: int) -> int:
        """Sum what a moment needs."""
        return self.moments[moment].own_bytes + sum(
            tensor.nbytes for i, tensor in enumerate(self.problem.tensors) if self.needs(i, moment)
        )

    def run(self) -> Result:
        """Walk with the clock."""
        problem = self.problem
        tensors = problem.tensors
        levels = [self.level(m) for m in range(len(self.moments))]
        gaps = {i: gap for i in range(len(tensors)) if (gap := self._moved_gap(i))}
        coming = sorted(gaps, key=lambda i: (gaps[i][1], i))
        leaving: list[tuple[float, int]] = []
        out_end: dict[int, float] = {}
        in_end: dict[int, float] = {}
        begun: dict[int, int] = {}
        room_at: dict[int, int] = {}
        memory = [0] * len(problem.steps)
        now = out_free = in_free = stalled_out = stalled_in = 0.0
        self._plan_room(coming, gaps, levels, room_at)
        for m, moment in enumerate(self.moments):
            early = sum(tensors[i].nbytes for i in begun if gaps[i][1] > m)
            leaving = [(end, i) for end, i in leaving if end > now]
            while leaving and levels[m] + early + self._bytes(leaving) > self.budget:
                stalled_out += leaving[0][0] - now
                now = leaving.pop(0)[0]
            for i in coming:
                if i in begun:
                    continue
                if room_at[i] > m:
                    break
                if gaps[i][1] == m:
                    stalled_out += max(0.0, out_end[i] - now)
                    now = max(now, out_end[i])
                    leaving = [(end, j) for end, j in leaving if end > now]
                else:
                    in_use = levels[m] + early + self._bytes(leaving)
                    if out_end[i] > now or in_use + tensors[i].nbytes > self.budget:
                        break
                    early += tensors[i].nbytes
                begun[i] = m
                in_free = max(in_free, now) + problem.inward.seconds(tensors[i].nbytes)
                in_end[i] = in_free
            in_use = levels[m] + early + self._bytes(leaving)
            memory[moment.step] = max(memory[moment.step], in_use)
            ready = max((in_end[i] for i in begun if gaps[i][1] == m), default=0.0)
            stalled_in += max(0.0, ready - now)
            now = max(now, ready) + moment.elapsed_s
            for i in sorted(gaps):
                if gaps[i][0] == m:
                    out_free = max(out_free, now) + problem.outward.seconds(tensors[i].nbytes)
                    out_end[i] = out_free
                    leaving.append((out_free, i))
        order = [(self.moments[begun[i]].step, i) for i in coming]
        return Result(max(memory), now, stalled_out, stalled_in, memory, order)

    def _moved_gap(self, tensor: int) -> tuple[int, int] | None:
        return self.away(tensor) if self.technique[tensor] == Technique.OFFLOAD else None

    def _bytes(self, leaving: list[tuple[float, int]]) -> int:
        return sum(self.problem.tensors[i].nbytes for _, i in leaving)

    def _plan_room(
        self,
        coming: list[int],
        gaps: dict[int, tuple[int, int]],
        levels: list[int],
        room_at: dict[int, int],
    ) -> None:
        """Find, one after the other, from when each copy in has room until its demand."""
        backward = self.problem.first_backward
        first = min(
            (m for m, x in enumerate(self.moments) if x.step >= backward),
            default=len(self.moments),
        )
        for i in coming:
            gap = gaps[i]
            begin = max([first, gap[0] + 1, *room_at.values()])
            nbytes = self.problem.tensors[i].nbytes
            while not self._has_room(range(begin, gap[1]), nbytes, levels, room_at, gaps):
                begin += 1
            room_at[i] = begin

    def _has_room(
        self,
        moments: range,
        nbytes: int,
        levels: list[int],
        room_at: dict[int, int],
        gaps: dict[int, tuple[int, int]],
    ) -> bool:
        """Tell whether bytes fit at each moment beside what is needed and what was begun."""
        for m in moments:
            early = sum(
                self.problem.tensors[i].nbytes for i in room_at if room_at[i] <= m < gaps[i][1]
            )
            if levels[m] + early + nbytes > self.budget:
                return False
        return True
