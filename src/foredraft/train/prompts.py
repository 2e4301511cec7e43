"""Prompts to train on, made from templates and from what every Python installation holds.

Passages come from the language reference (``pydoc_data.topics``) and functions of the standard library; later
prompts (:func:`follow_ups`) build on texts that the target wrote itself. Nothing is taken from a benchmark.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from foredraft.train import prompt_words as words

Message = dict[str, str]
Conversation = list[Message]

_EXPLAIN = [
    "Explain {t} to a ten-year-old.",
    "What is the history of {t}?",
    "What are the most common misunderstandings about {t}?",
    "Give me five interesting facts about {t}.",
    "Write a short article about {t}.",
    "How does {t} affect our daily life?",
    "Compare {t} with {u}.",
    "Write a quiz with three questions and answers about {t}.",
    "Why is {t} important? Answer in one paragraph.",
    "Describe {t} in simple words, then give an example.",
    "I have to give a talk about {t}. Make an outline.",
    "What should a beginner know about {t}?",
    "What are the advantages and disadvantages of {t}?",
    "List ten things that everyone should know about {t}.",
    "Write a blog post about {t} with a title and three sections.",
    "I read something about {t} yesterday. What exactly is that?",
    "How has {t} changed over the last hundred years?",
    "Write an opening paragraph for an essay about {t}.",
    "What is the difference between {t} and {u}?",
    "Which books or courses about {t} do you recommend, and why?",
    "Tell me a story that teaches something about {t}.",
    "Explain how {t} and {u} are related.",
    "What might {t} look like in fifty years?",
    "Can you answer a question about {t}? What is the hardest part to understand?",
]
_HOW = [
    "How do I {t}?",
    "Give me a step-by-step guide to {t}.",
    "What are the biggest mistakes people make when they {t}?",
    "I want to {t} but I have little time. What do you suggest?",
    "Make a checklist for someone who wants to {t}.",
    "My friend asked me how to {t}. What should I answer?",
    "Explain in five short steps how to {t}.",
    "What do I need before I {t}?",
    "Write a short guide for beginners: how to {t}.",
]
_STORY = [
    "Write a short story about {t}.",
    "Write a poem about {t}.",
    "Write the first paragraph of a novel about {t}.",
    "Write a dialogue between {t} and {u}.",
    "Invent a title and a plot for a film about {t}.",
    "Continue this story: once upon a time there was {t}.",
    "Describe {t} as vividly as you can.",
]
_ROLE = [
    "Pretend you are {t}. Introduce yourself and tell me about your day.",
    "You are {t}. Give me advice on how to {h}.",
    "Answer as {t}: what do you think about {s}?",
]
_PLACE = [
    "Plan a three-day trip to {t}.",
    "What food should I try in {t}?",
    "Tell me about the history and culture of {t}.",
    "Write a blog post about a weekend in {t}.",
    "What is the best time of the year to visit {t}, and why?",
]
_MAIL = [
    "Write an e-mail to my boss asking for {t}.",
    "Write a polite letter to a neighbour about {t}.",
    "Write a short message to a friend about {t}.",
]
_MAIL_TOPICS = [
    "two days off", "a new laptop", "noise at night", "a broken fence", "a surprise party", "a lost umbrella",
    "a raise", "moving the meeting to Thursday", "feedback on a report", "a cancelled trip", "help with a move",
    "a training course",
]  # fmt: skip
_CODE = [
    "Write a {l} function that {t}.",
    "Write a {l} program that {t}, with comments.",
    "Show me how to write code in {l} that {t}, and explain it.",
    "Implement in {l}: a function which {t}. Include an example call.",
]
_MATHS = [
    "{a} has {x} {g}. {b} gives {a} {y} more, and {a} loses {z}. How many {g} does {a} have now?",
    "A box holds {y} {g}. How many {g} are in {x} boxes, and how much do they cost at ${z} each?",
    "{a} earns ${x} an hour and works {y} hours a day. How much does {a} earn in {z} days?",
    "A shop sells {g} at ${z} each. {a} buys {y} and pays with ${h}. How much change does {a} get?",
    "{a} reads {y} pages a day. How many days does it take to read a book of {h} pages?",
    "{a} is {y} years older than {b}. In {z} years {b} will be {x}. How old is {a} now?",
    "A train travels {h} km in {z} hours. How far does it go in {y} hours at the same speed?",
    "What is {x} * {y} + {z}? Show the steps.",
    "{a} divides {h} {g} equally among {y} friends. How many does each get and how many are left?",
]
_PASSAGE = [
    "Summarise the following text in three sentences.\n\n{t}",
    "Read the text and answer: what is it about, and what are its main points?\n\n{t}",
    "Rewrite this text in simpler words:\n\n{t}",
    "Extract the key facts from this text as a bulleted list:\n\n{t}",
    "Give this text a title and a one-sentence summary.\n\n{t}",
    "Write three questions that this text answers, with their answers.\n\n{t}",
]
_RETRIEVAL = [
    "Answer from these passages only.\n\n[1] {t}\n\n[2] {u}\n\nQuestion: what does passage {n} say?",
    "Here are two passages.\n\n[1] {t}\n\n[2] {u}\n\nWhich one is harder to understand, and why?",
    "Use the context to answer.\n\nContext: {t}\n\nQuestion: what is this used for?",
    "Find the most important sentence of this text and quote it.\n\n{t}",
]
_FUNCTION = [
    "Explain what this Python code does:\n\n```python\n{t}\n```",
    "Add a docstring and comments to this function and print the whole function:\n\n```python\n{t}\n```",
    "Add type hints to this function and print it again:\n\n```python\n{t}\n```",
    "Rename the variables of this function to clearer names and print the result:\n\n```python\n{t}\n```",
    "Write a unit test for this function:\n\n```python\n{t}\n```",
    "Is there a bug in this code? Explain, and print a corrected version.\n\n```python\n{t}\n```",
]
_FOLLOW = [
    "Make it shorter.", "Give me an example.", "Rewrite it for children.", "Now make a list of the key points.",
    "Can you explain the last point in more detail?", "Translate the first sentence to {l}.", "Why?",
    "Write it as an e-mail.",
    "What could go wrong?", "Thank you! What should I read next?", "Rewrite your answer in a formal tone.",
    "Turn your answer into a table.", "Summarise your answer in one sentence.", "Write it again with more detail.",
]  # fmt: skip


def first_prompts(n: int, seed: int = 0) -> list[Conversation]:
    """``n`` conversations of one user message each, the same for the same seed and Python version."""
    rng = random.Random(seed)
    topics, how, places = words.split(words.TOPICS), words.split(words.HOW_TO), words.split(words.PLACES)
    people, roles, tasks = words.split(words.PEOPLE), words.split(words.ROLES), words.split(words.CODE_TASKS)
    names, goods, tongues = words.split(words.NAMES), words.split(words.GOODS), words.split(words.TONGUES)
    sentences, passages, functions = words.split(words.SENTENCES), _passages(), _functions()

    def maths() -> str:
        a, b = rng.sample(names, 2)
        numbers = {"x": rng.randint(12, 60), "y": rng.randint(3, 15), "z": rng.randint(2, 9), "h": rng.randint(80, 400)}
        return rng.choice(_MATHS).format(a=a, b=b, g=rng.choice(goods), **numbers)

    def pair(templates: Sequence[str], entries: Sequence[str]) -> str:
        t, u = rng.sample(entries, 2)
        extra = {"h": rng.choice(how), "s": rng.choice(topics), "l": rng.choice(words.LANGUAGES)}
        return rng.choice(templates).format(t=t, u=u, **extra)

    kinds: list[tuple[float, Callable[[], str]]] = [
        (0.25, lambda: pair(_EXPLAIN, topics)),
        (0.12, lambda: pair(_HOW, how)),
        (0.08, lambda: pair(_STORY, people)),
        (0.05, lambda: pair(_ROLE, roles)),
        (0.06, lambda: pair(_PLACE, places)),
        (0.03, lambda: pair(_MAIL, _MAIL_TOPICS)),
        (0.16, lambda: pair(_CODE, tasks)),
        (0.08, maths),
        (0.05, lambda: rng.choice(_PASSAGE).format(t=rng.choice(passages))),
        (0.03, lambda: _retrieval(rng, passages)),
        (0.06, lambda: rng.choice(_FUNCTION).format(t=rng.choice(functions))),
        (0.03, lambda: f"Translate to {rng.choice(tongues)}: {rng.choice(sentences)}"),
    ]
    weights = [weight for weight, _ in kinds]
    makers = [make for _, make in kinds]
    found: dict[str, None] = {}
    for _ in range(20 * n):
        if len(found) == n:
            break
        found[rng.choices(makers, weights)[0]()] = None
    return [[{"role": "user", "content": text}] for text in found]


def follow_ups(answered: Sequence[tuple[Conversation, str]], n: int, seed: int = 0) -> list[Conversation]:
    """``n`` conversations that work on what the target answered before: tasks over its text, and second turns."""
    rng = random.Random(seed)
    tongues = words.split(words.TONGUES)
    result: list[Conversation] = []
    for conversation, answer in rng.sample(list(answered), min(n, len(answered))):
        if rng.random() < 0.5:
            task = rng.choice(_PASSAGE).format(t=answer.strip())
            result.append([{"role": "user", "content": task}])
        else:
            then = rng.choice(_FOLLOW).format(l=rng.choice(tongues))
            result.append([*conversation, {"role": "assistant", "content": answer}, {"role": "user", "content": then}])
    return result


def _retrieval(rng: random.Random, passages: Sequence[str]) -> str:
    t, u = rng.sample(passages, 2)
    return rng.choice(_RETRIEVAL).format(t=t, u=u, n=rng.randint(1, 2))


@cache
def _passages(longest: int = 1200) -> list[str]:
    """Paragraphs of prose from Python's language reference, in whole sentences."""
    from pydoc_data.topics import topics

    result = []
    for text in topics.values():
        for part in re.split(r"\n(?=\S[^\n]*\n[=*-]{4,})", text):
            prose = re.sub(r"[ \t]+", " ", re.sub(r"\n[=*~-]{4,}\n", "\n\n", part)).strip()
            cut = prose[:longest].rfind(". ") if len(prose) > longest else len(prose)
            if cut > 250:
                result.append(prose[: cut + 1])
    return result


@cache
def _functions(shortest: int = 5, longest: int = 30) -> list[str]:
    """Functions of the standard library, between ``shortest`` and ``longest`` lines."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    result = []
    for path in sorted(folder.glob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            body = ast.parse(source).body
        except (SyntaxError, UnicodeDecodeError):
            continue
        nested = [item for node in body if isinstance(node, ast.ClassDef) for item in node.body]
        for node in [*body, *nested]:
            if isinstance(node, ast.FunctionDef) and shortest <= (node.end_lineno or 0) - node.lineno < longest:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                result.append("\n".join(line[node.col_offset :] for line in lines))
    return result
