"""Small templates, each with one habit of the templates in the field. Written for these tests."""

from __future__ import annotations

CONTROL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|stop|>", "<|pad|>", "<|turn|>", "<|call|>", "<|obs|>")
"""Added to the test tokenizer."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Keeps everything as it is."""

CHATML_TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same text, with the assistant's part marked by the template itself."""

TRIMMED = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n\n"
    "{{ m.content | trim }}<|stop|>{% endfor %}{% if add_generation_prompt %}<|turn|>model\n\n{% endif %}"
)
"""Strips every text, renames the role, writes BOS."""

THINK_STRIPPED = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set think = m.reasoning_content or '' %}{% set text = m.content %}"
    "{% if not think and '</think>' in text %}"
    "{% set think = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (think or loop.last) %}<think>\n{{ think.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ text }}"
    "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows thinking after the last user turn only, and an empty think block where the last reply has none."""

THINK_PROMPTED = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n<think>\n{% endif %}"
)
"""Its generation prompt opens the thinking, so it is no prefix of a turn without any."""

THINK_DROPPED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|turn|>{{ m.content.split('</think>')[-1] }}<|stop|>"
    "{% else %}<|obs|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn|><think>\n{% endif %}"
)
"""Shows no thinking anywhere."""

CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|turn|>assistant<|obs|>{{ m.thinking }}<|im_end|>{% endif %}"
    "<|turn|>assistant<|call|>{{ m.content }}{% if loop.last %}<|stop|>{% else %}<|im_end|>{% endif %}"
    "{% else %}<|turn|>{{ m.role }}<|call|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant{% endif %}"
)
"""Another end token for the last reply; thinking in a channel of its own, from the key `thinking`."""

NO_END = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""Turns end where the next begins."""

EOS_AFTER_LAST = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% else %}<|pad|>{% endif %}"
)
"""A finished conversation gets one token more: none of its beginnings is a prefix of it."""

SYSTEM_IN_LAST_USER = (
    "{% set ns = namespace(system='', last=-1) %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|turn|>{% if loop.index0 == ns.last and ns.system %}{{ ns.system }}\n\n{% endif %}"
    "{{ m.content }}<|obs|>{% elif m.role == 'assistant' %}{{ m.content }}<|stop|>{% endif %}{% endfor %}"
)
"""Moves the system text down into the last question; nothing stands between a question and its reply."""

ASKS_THE_TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' and m.content.startswith('<doc>') %}(document)\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Looks at how a user's text begins."""

COUNTS_CHARACTERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content | length }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""Sentinels change it, but each beginning is a prefix: the second proof."""

NEWEST_FIRST = (
    "{% for m in messages | reverse %}<|im_start|>{{ m.role }} {{ m.content | length }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
)
"""Neither proof can hold."""

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "<|turn|>{{ m.role }}\n{{ m.content }}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

DATED = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + CHATML

CALLS_NEED_MAPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'tool' %} "
    "{{ messages[loop.index0 - 1].tool_calls[0].function.name }}{% endif %}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Iterates over arguments, and names the function again above its result."""

CALLS_NEED_TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Glues arguments to text."""

CALLS_ESCAPE_TEXT = (
    "{% if tools %}<|obs|>{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Would escape JSON text a second time."""

CALLS_AND_EMPTY_REPLY = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}<|stop|>{% endfor %}"
    "{% if m.content is not none %}<|turn|>{{ m.role }}\n{{ m.content }}<|stop|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""Tells null from empty: a call with empty text would be followed by a reply of nothing."""

RESULTS_END_TWO_WAYS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}(result\n{{ m.content }}{{ '\n)' if loop.last else '\n)\n' }}<|im_end|>"
    "{% else %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Closes a result otherwise when a turn follows: its generation prompt begins after other words."""

NO_CALLS = CHATML
"""Knows nothing of calls."""

CHATML_WITHOUT_EMPTY = (
    "{% for m in messages %}{% if m.content %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows nothing at all of a turn without text."""
