"""An engine in this process that computes prompts but generates no text, for warm-ups.

The engine takes the arguments of ``vllm serve``. Its chunks equal the chunks of a server with
the same arguments. The engine's core runs in this process. So if this process is killed, the
core ends too, and its caches are unlocked.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.renderers import ChatParams, merge_kwargs, renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from kvtier.connector.figures import StoreInfo
from kvtier.errors import ConfigError, KvtierError, UnsupportedError
from kvtier.keys import ChunkKey
from kvtier.printable import printable
from kvtier.vllm.adapters import AdapterContents
from kvtier.vllm.connector import KVTierConnector
from kvtier.vllm.engine import kv_dtype
from kvtier.vllm.versions import supported

__all__ = ["OfflineEngine", "OfflineSetup"]

_PARSERS: Final = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Modules that define the arguments of ``vllm serve``: in vLLM 0.32, and in earlier
releases."""


class OfflineSetup:
    """An engine that has not started, described by arguments of ``vllm serve``.

    Args:
        model: The model, as in ``vllm serve MODEL``.
        arguments: The other arguments.
        transfer: vLLM's ``--kv-transfer-config``; None if the engine will not be started.

    Raises:
        ConfigError: An argument is wrong, or the model's configuration cannot be read.

    Attributes:
        algorithm: vLLM's ``--prefix-caching-hash-algo``.
        block_tokens: Number of tokens of a block, if known before the start.
        most_tokens: Number of tokens of the longest permitted prompt.
        vocabulary: Number of token ids.
        identity: The part of a namespace's identity that the arguments determine.
        lora_paths: Path of each LoRA adapter, by name.
    """

    def __init__(
        self,
        model: str,
        arguments: Sequence[str],
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        self._args = _parse(model, arguments)
        options = AsyncEngineArgs.from_cli_args(self._args)
        if options.data_parallel_size > 1:
            raise ConfigError(
                "--data-parallel-size: a warm-up fills the cache of one rank; leave it out, "
                "and copy the cache to the other ranks, or use --server"
            )
        if transfer is not None:
            options.kv_transfer_config = KVTransferConfig(**transfer)
        self._logs_statistics = not options.disable_log_stats
        try:
            self._config = options.create_engine_config(UsageContext.OPENAI_API_SERVER)
        except (OSError, ValueError) as error:  # pydantic's errors are ValueErrors
            raise ConfigError(_one_line(error)) from error
        self.algorithm: str = self._config.cache_config.prefix_caching_hash_algo
        self.block_tokens: int = self._config.cache_config.block_size
        self.most_tokens: int = self._config.model_config.max_model_len - 1
        self.vocabulary: int = self._config.model_config.get_vocab_size()
        self.identity: dict[str, str | int] = {"kv_dtype": kv_dtype(self._config)}
        ranks: int = self._config.parallel_config.decode_context_parallel_size
        if self._args.block_size is not None and ranks == 1:
            self.identity["tokens_per_hash"] = self.block_tokens
        adapters = self._args.lora_modules or ()
        self._loras = {
            each.name: _lora(each, number) for number, each in enumerate(adapters, start=1)
        }
        self.lora_paths = {each.name: each.path for each in adapters}
        self._adapters = AdapterContents(self._config.lora_config)
        self._renderer: Any = None

    def tokens_of_text(self, text: str) -> list[int]:
        """Return the token ids of a text, as in a request for a completion.

        Raises:
            ConfigError: The model's tokenizer cannot be loaded, or refuses the text.
        """
        (rendered,) = self._render("render_cmpl", [{"prompt": text}])
        return list(rendered["prompt_token_ids"])

    def tokens_of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any] | None,
    ) -> list[int]:
        """Return the token ids of a conversation, as in a request for a chat completion.

        Raises:
            ConfigError: The model's tokenizer or chat template cannot be loaded, or refuses the
                conversation.
        """
        if self._config.model_config.hf_config.model_type == "gpt_oss":
            problem = "vLLM has a format of its own for conversations of this model"
            raise ConfigError(f"messages: {problem}; write prompt_token_ids")
        parameters = self._chat_parameters(dict(template_arguments or {}), tools)
        _, (rendered,) = self._render("render_chat", [list(messages)], parameters)
        if "prompt_token_ids" not in rendered or rendered.get("mm_hashes"):
            raise ConfigError("messages: only text can be warmed up; leave out other content")
        return list(rendered["prompt_token_ids"])

    def name_chunk(self, lora: str) -> Callable[[ChunkKey], ChunkKey]:
        """Return a function that converts an adapter's chunk keys from vLLM's to kvtier's."""
        return self._adapters.content_of(self._loras[lora]).key

    def start(self) -> OfflineEngine:
        """Start the engine. This call takes minutes for a large model.

        Raises:
            KvtierError: kvtier or vLLM refuses to start, for example because of the cache.
        """
        try:
            engine = LLMEngine(
                self._config,
                Executor.get_class(self._config),
                log_stats=self._logs_statistics,
                usage_context=UsageContext.OPENAI_API_SERVER,
                multiprocess_mode=False,
            )
        except Exception as error:  # a worker's own error, of any kind, is in the log
            raise KvtierError(f"{_one_line(error)}; see its log above") from error
        return OfflineEngine(engine, self._loras)

    def close(self) -> None:
        """End the threads that read adapters. Idempotent."""
        self._adapters.close()

    def _render(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401 - vLLM's
        if self._config.model_config.skip_tokenizer_init:
            raise ConfigError("--skip-tokenizer-init: texts need the tokenizer; leave it out")
        try:
            if self._renderer is None:
                self._renderer = renderer_from_config(self._config)
            return getattr(self._renderer, method)(*arguments)
        except Exception as error:  # a tokenizer or a template may raise anything
            raise ConfigError(_one_line(error)) from error

    def _chat_parameters(self, template_arguments: dict[str, Any], tools: object) -> Any:  # noqa: ANN401 - vLLM's
        if self._renderer is None:
            self._render("get_tokenizer")
        own = {
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": tools,
            # Mistral's own tokenizer makes tokens of a conversation in one go.
            "tokenize": type(self._renderer.tokenizer).__name__ == "MistralTokenizer",
        }
        defaults = self._args.default_chat_template_kwargs
        return ChatParams(
            chat_template=load_chat_template(self._args.chat_template),
            chat_template_content_format=self._args.chat_template_content_format,
            chat_template_kwargs=merge_kwargs(defaults, own | template_arguments),
        )


class OfflineEngine:
    """A running engine, driven by one thread.

    Args:
        engine: vLLM's engine, with its core in this process.
        loras: LoRA adapters by name.

    Attributes:
        ram_chunks: Number of slots of the RAM tier.
        max_requests: Largest number of requests that the engine runs at the same time.
        stores: The files or services in which the tiers keep chunks.
    """

    def __init__(self, engine: Any, loras: Mapping[str, Any]) -> None:  # noqa: ANN401 - vLLM's
        self._engine = engine
        self._loras = loras
        self._scheduler = engine.engine_core.engine_core.scheduler
        connector = self._scheduler.connector
        if not isinstance(connector, KVTierConnector):
            raise UnsupportedError(
                f"vLLM runs a {type(connector).__name__} in place of kvtier's connector: "
                f"{supported()}"
            )
        self._cache = connector.cache
        figures = self._cache.statistics()
        self.ram_chunks = figures.tiers[0].capacity_chunks
        self.max_requests: int = engine.vllm_config.scheduler_config.max_num_seqs
        self.stores: Sequence[StoreInfo] = figures.stores
        self._unwritten = 0
        self._running: set[str] = set()

    def add(self, line: int, tokens: Sequence[int], *, lora: str, cache_salt: str) -> str:
        """Queue a prompt; return vLLM's error, or an empty text if vLLM accepts the prompt."""
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(tokens)}
        if cache_salt:
            prompt["cache_salt"] = cache_salt
        try:
            self._engine.add_request(
                str(line),
                prompt,
                SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
                lora_request=self._loras[lora] if lora else None,
            )
        except ValueError as error:
            return _one_line(error)
        self._running.add(str(line))
        return ""

    def step(self) -> Sequence[tuple[int, int, int]]:
        """Run one step.

        Returns:
            One tuple per prompt that ended: the prompt's line, its number of tokens, and the
            number of these tokens that came from a cache.
        """
        ended = [each for each in self._engine.step() if each.finished]
        self._running.difference_update(each.request_id for each in ended)
        self._unwritten = self._cache.statistics().tiers[0].held_chunks
        return [
            (int(each.request_id), len(each.prompt_token_ids), each.num_cached_tokens or 0)
            for each in ended
        ]

    def has_work(self) -> bool:
        """Return whether the engine has a prompt to compute or a chunk to move."""
        return bool(self._scheduler.has_requests() or self._unwritten)

    def unwritten_chunks(self) -> int:
        """Return how many chunks in RAM are in use or not yet in a slower tier."""
        return self._unwritten

    def abort(self) -> None:
        """Drop all queued and running prompts."""
        self._engine.abort_request(list(self._running))
        self._running.clear()

    def close(self) -> None:
        """Write the remaining chunks, close the tiers and end the engine."""
        self._engine.engine_core.shutdown()


def _lora(adapter: Any, number: int) -> Any:  # noqa: ANN401 - vLLM's
    """Return the ``LoRARequest`` of an adapter in ``--lora-modules``."""
    is_3d = {"is_3d_lora_weight": True} if getattr(adapter, "is_3d_lora_weight", False) else {}
    return LoRARequest(adapter.name, number, adapter.path, **is_3d)


def _parse(model: str, arguments: Sequence[str]) -> Any:  # noqa: ANN401 - vLLM's
    """Return the arguments of ``vllm serve MODEL`` as vLLM parses them.

    Raises:
        ConfigError: An argument is wrong.
    """
    parser = _make_parser()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_args([*arguments, "--model", model])
    except SystemExit as error:
        lines = said.getvalue().strip().splitlines() or ["vLLM refuses the arguments"]
        problem = lines[-1].partition("error: ")[2] or lines[-1]
        remedy = "write the arguments of vllm serve after --"
        raise ConfigError(f"{printable(problem)}; {remedy}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(_one_line(error)) from error
    if parsed.kv_transfer_config is not None:
        raise ConfigError("--kv-transfer-config: kvtier warmup sets it; leave it out")
    return parsed


def _make_parser() -> Any:  # noqa: ANN401 - vLLM's
    for name in _PARSERS:
        with contextlib.suppress(ImportError):
            make = importlib.import_module(name).make_arg_parser
            return make(FlexibleArgumentParser(add_help=False))
    raise UnsupportedError(f"this vLLM has none of {', '.join(_PARSERS)}: {supported()}")


def _one_line(error: Exception) -> str:
    """Return vLLM's error as one line."""
    lines = str(error).splitlines()
    # The first line of pydantic's errors only counts them, and the last names a web page.
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = [line for line in lines[1:] if "errors.pydantic.dev" not in line]
    text = " ".join(" ".join(lines).split())
    return f"vLLM: {printable(text) or type(error).__name__}"
