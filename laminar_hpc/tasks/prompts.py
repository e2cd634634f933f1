"""From a data set's prompt to the text that the model is given: task.template, and the model's chat template."""

from __future__ import annotations

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.tasks.api import Quote
from laminar_hpc.tasks.table import ChatMessage, Prompt


class PromptText:
    """What a config says about the text of its prompts."""

    def __init__(self, config: Config) -> None:
        """Reads the chat template where `task.chat` asks for it; ConfigError where there is none."""
        self._template = config.task.template
        self._system = config.task.system
        self._chat = None
        if config.task.system and not config.task.chat:
            raise ConfigError("task.system is the system message of a chat template; it needs task.chat = true")
        if config.task.chat:
            try:
                from laminar_hpc.tasks.chat import ChatTemplate
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"task.chat = true needs the package {error.name}: pip install 'laminar_hpc[tasks]'"
                ) from error
            self._chat = ChatTemplate(config.model.path)

    @property
    def has_special_tokens(self) -> bool:
        """Whether the text brings all special tokens itself, so that a tokenizer must not add its own."""
        return self._chat is not None

    def text(self, prompt: Prompt, quote: Quote) -> str:
        """The text of a prompt; whatever comes from the data set goes through `quote`.

        A text becomes the user's message; messages are taken as they are. The system message of the config comes first
        where the messages have none.
        """
        if isinstance(prompt, str):
            filled = self._template.replace("{prompt}", quote(prompt))
            messages = [ChatMessage("user", filled)]
        else:
            filled = ""
            messages = [ChatMessage(message.role, quote(message.content)) for message in prompt]
        if self._chat is None:
            return filled
        if self._system and messages[0].role != "system":
            messages.insert(0, ChatMessage("system", self._system))
        return self._chat.render(messages)
