"""One run: read, ask, keep. One event loop, and one thread that parses, renders and tokenizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from hsdump.arrays import xxh3
from hsdump.errors import HsdumpError
from hsdump.generate.journal import Answer, Journal
from hsdump.generate.options import GenerateOptions
from hsdump.generate.server import AnswerServer, AskFailed, Reply
from hsdump.generate.state import GenerateState
from hsdump.prompts import Renderer, Skip
from hsdump.prompts.conversation import Message
from hsdump.prompts.inputs import read_rows
from hsdump.prompts.options import RowRefused
from hsdump.prompts.questions import Question, parse_question
from hsdump.prompts.renderer import AskedTokens, row_source

T = TypeVar("T")

READ_AHEAD = 64
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


class Generator:
    """Asks a server what rows ask, and keeps every answer as it arrives."""

    def __init__(
        self, server: AnswerServer, renderer: Renderer, options: GenerateOptions, journal: Journal, state: GenerateState
    ) -> None:
        self._server, self._renderer, self._options, self._journal = server, renderer, options, journal
        self.state = state
        self._slots = asyncio.Semaphore(options.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._unforeseen: BaseException | None = None
        self._text_thread = ThreadPoolExecutor(1, "hsdump-text")

    def stop(self, reason: str) -> None:
        """Ask nothing more; what is in flight is waited for and kept."""
        if not self._stop.is_set():
            self.state.stopped = reason
            self._stop.set()

    async def run(self) -> None:
        """Go through the whole input, or as far as it gets; the state says how it ended."""
        try:
            await self._admit_all()
            while self._tasks:
                await asyncio.wait(set(self._tasks))
        except HsdumpError as error:
            self._end_early(error)
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._text_thread.shutdown(cancel_futures=True)
        if self._unforeseen is not None:
            raise self._unforeseen

    def _end_early(self, error: HsdumpError) -> None:
        self.state.error = self.state.error or error
        self.stop(error.what)

    async def _admit_all(self) -> None:
        rows = read_questions(self._options.inputs, self._renderer, self._options)
        while not self._stop.is_set():
            batch = await self._in_text_thread(_take, rows, READ_AHEAD)
            if not batch:
                self.state.rows_expected = self.state.rows
                return
            for item in batch:
                if self._stop.is_set():
                    return
                self.state.rows += 1
                if isinstance(item, Skip):
                    self.state.skip(item)
                else:
                    await self._admit(*item)

    async def _admit(self, source: str, shape: str, question: Question) -> None:
        state = self.state
        state.notes[f"shape:{shape}"] += 1
        if not self._journal.add_question(question.key, source):
            state.skip(Skip(source=source, reason="duplicate", detail="the same question was asked before"))
            return
        state.questions += 1
        state.notes["replies-kept-as-given"] += question.kept_replies
        for number in range(self._options.num_answers):
            if self._journal.is_done(question.key, number):
                state.done += 1
                state.already += 1
                continue
            reason = self._journal.failure(question.key, number)
            if reason is not None and not self._options.retry_failed:
                state.earlier_failures += 1
                continue
            await self._slots.acquire()
            if self._stop.is_set():
                self._slots.release()
                return
            task = asyncio.create_task(self._converse(source, question, number))
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._unforeseen = self._unforeseen or error
            self.stop(f"internal error: {error!r}")

    async def _converse(self, source: str, question: Question, number: int) -> None:
        """Ask turn after turn, each with the target's own earlier answers."""
        self.state.in_flight += 1
        try:
            if await self._ask_all(question, number):
                self.state.done += 1
        except AskFailed as failure:
            self._journal.add_failure(question.key, number, failure.reason, failure.detail)
            self.state.fail(failure.reason, source, failure.detail)
        except RowRefused as refused:
            # The template does not take this conversation, or it has grown too long: a property of the row.
            self._refuse(source, question, number, refused)
        except HsdumpError as error:
            self._end_early(error)
        finally:
            self.state.in_flight -= 1

    def _refuse(self, source: str, question: Question, number: int, refused: RowRefused) -> None:
        if self._journal.answers(question.key, number):
            self._journal.end_early(question.key, number)
            self.state.notes[f"ended-early:{refused.reason}"] += 1
            self.state.done += 1
        elif number == 0:
            self.state.skip(Skip(source=source, reason=refused.reason, detail=refused.detail))

    async def _ask_all(self, question: Question, number: int) -> bool:
        """Ask what is not answered yet; False when the run was stopped before the end."""
        known = self._journal.answers(question.key, number)
        messages: list[Message] = []
        turn = 0
        for given in question.turns:
            if given is not None:
                messages.append(given)
                continue
            asked = await self._in_text_thread(self._renderer.ask, messages, question.tools)
            if turn < len(known):
                answer = known[turn]
            elif self._stop.is_set():
                return False  # stays to do for the next run
            else:
                answer = await self._answer(question, number, turn, asked)
            turn += 1
            if answer.is_last:
                break
            messages.append(self._as_message(answer, asked.opens_thinking))
        return True

    async def _answer(self, question: Question, number: int, turn: int, asked: AskedTokens) -> Answer:
        """Ask one turn, and keep the answer before anything else happens to it."""
        room = self._options.prompts.max_tokens - len(asked.input_ids)
        if room < 1:
            detail = f"{len(asked.input_ids)} tokens before the answer, the limit is {self._options.prompts.max_tokens}"
            raise RowRefused("too-long", f"{detail} (--max-tokens)")
        seed = self._seed(question.key, number, turn)
        reply = await self._try_until_answered(asked, min(room, self._options.sampling.max_new_tokens), seed)
        if int(reply.output_ids.max()) >= self._renderer.vocab_size:
            detail = f"token id {int(reply.output_ids.max())} of a vocabulary of {self._renderer.vocab_size}"
            raise AskFailed("other-tokenizer", f"{detail}: --model is not what the server serves", transient=False)
        answer = Answer(
            prompt_ids=asked.input_ids.astype("<i4"),
            output_ids=reply.output_ids.astype("<i4"),
            finish=reply.finish,
            is_last=turn + 1 == question.num_answers or reply.finish == "length",
        )
        self._journal.add_answer(question.key, number, turn, answer)
        state = self.state
        state.answers += 1
        state.answer_tokens += len(answer.output_ids)
        state.prompt_tokens += len(answer.prompt_ids)
        state.finish[answer.finish] += 1
        if answer.finish == "length" and turn + 1 < question.num_answers:
            state.notes["ended-early:answer-cut"] += 1
        return answer

    async def _try_until_answered(self, asked: AskedTokens, max_new_tokens: int, seed: int | None) -> Reply:
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, self._options.attempts + 1):
            try:
                return await self._server.ask(asked.input_ids.tolist(), self._options.sampling, max_new_tokens, seed)
            except AskFailed as failure:
                if not failure.transient or attempt == self._options.attempts:
                    raise
                self.state.retries += 1
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _seed(self, key: str, number: int, turn: int) -> int | None:
        """Make the seed of one answer: another for each, and the same when the run is repeated."""
        if self._options.sampling.seed is None:
            return None
        return int(xxh3(f"{self._options.sampling.seed}/{key}/{number}/{turn}".encode())[:8], 16) >> 1

    def _as_message(self, answer: Answer, opens_thinking: str) -> Message:
        """Give an answer as the next turn's template will get it: its text, without the token that ended it.

        Thinking that the generation prompt opened gets its mark back, so that the template can tell it apart.
        """
        text = self._renderer.tokens.decode(answer.output_ids[:-1].tolist())
        return Message(role="assistant", content=opens_thinking + text)

    async def _in_text_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, function, *args)


def read_questions(
    inputs: Sequence[Path], renderer: Renderer, options: GenerateOptions
) -> Iterator[tuple[str, str, Question] | Skip]:
    """Stream the questions of files: source, shape, question; or what asks nothing."""
    for path in inputs:
        for row in read_rows(path):
            if isinstance(row, Skip):
                yield row
                continue
            source = row_source(row)
            try:
                shape, question = parse_question(row.value, options.prompts, options.replies)
                renderer.check_text([turn for turn in question.turns if turn is not None], question.tools)
            except RowRefused as refused:
                yield Skip(source=source, reason=refused.reason, detail=refused.detail)
            else:
                yield source, shape, question


def _take(rows: Iterator[T], count: int) -> list[T]:
    return list(islice(rows, count))
