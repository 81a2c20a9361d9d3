"""Renders conversations with the chat templates that the package `trl` holds, as transformers does.

chat_templates.py OUTPUT.jsonl

A line has `name`, `template`, `messages`, `tools`, `prompt`, and `text` with `answers` (the
characters of `{% generation %}`), or `error`.
"""

import datetime
import importlib.util
import json
import pathlib
import sys

from transformers.utils import chat_template_utils


class FixedDate(datetime.datetime):
    """Templates may write the date of today."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 31)


chat_template_utils.datetime = FixedDate

folder = pathlib.Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
assert folder.is_dir(), folder

user = {"role": "user", "content": "What is 2 + 2?"}
answer = {"role": "assistant", "content": "It is 4."}
system = {"role": "system", "content": "Be <brief> & \"kind\"."}
again = {"role": "user", "content": "  And 3 + 3?\n"}
last = {"role": "assistant", "content": "That is 6, ü.\n"}
thinking = {"role": "assistant", "content": "<think>\nadd\n</think>\n\nIt is 4."}
call = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "call12345",
            "function": {"name": "add", "arguments": {"b": 2, "a": [1, 2.5, None, True]}},
        }
    ],
}
result = {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "{\"sum\": 4}"}
tools = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers <&>.",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "number", "description": "one"}, "a": {"type": "number"}},
                "required": ["b", "a"],
            },
        },
    }
]
conversations = [
    ([user, answer], None),
    ([system, user, answer, again, last], None),
    ([user, thinking], None),
    ([user, answer, again, thinking], None),
    ([user, call, result, last], tools),
]
# Tokens that templates write by name.
special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

with open(sys.argv[1], "w") as output:
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text()
        for messages, given in conversations:
            for prompt in [False, True]:
                line = {"name": path.name, "template": template, "messages": messages, "tools": given, "prompt": prompt}
                try:
                    texts, answers = chat_template_utils.render_jinja_template(
                        [messages],
                        tools=given,
                        chat_template=template,
                        return_assistant_tokens_mask="generation" in template,
                        add_generation_prompt=prompt,
                        **special,
                    )
                    line["text"] = texts[0]
                    line["answers"] = [list(pair) for pair in answers[0]] if answers and answers[0] else []
                except Exception as error:  # the template refuses the conversation
                    line["error"] = f"{type(error).__name__}: {error}"
                output.write(json.dumps(line) + "\n")
