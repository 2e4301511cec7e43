"""Twenty prompts of our own for the identity and law measurements: chat, code, copying, tables, other scripts."""

from __future__ import annotations

CHAT = [
    "Give me three tips for sleeping better.",
    "Explain what a hash table is to a ten-year-old.",
    "Write a short poem about the sea in winter.",
    "What is the difference between weather and climate?",
    "List five European capitals and one fact about each.",
    "How do I boil an egg so that the yolk stays soft?",
    "Summarise in two sentences why the sky is blue.",
    "Translate to French: The meeting starts at nine tomorrow morning.",
]

CODE = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Rename the variable x to total in this code and print the whole result:\n\n"
    "def add(values):\n    x = 0\n    for value in values:\n        x = x + value\n    if x > 100:\n"
    "        x = 100\n    return x\n",
    "Write a SQL query that counts the orders of each customer in a table orders(id, customer_id, total).",
    "Write a bash loop that renames every .txt file in a folder to .md.",
]

COPY = [
    "Repeat this list exactly, one item a line: apples, pears, plums, cherries, apricots, quinces, figs, dates.",
    "Turn this into JSON: name Ada, born 1815, field mathematics; name Alan, born 1912, field computing; "
    "name Grace, born 1906, field computing.",
    "Correct the spelling and give the whole text back: The libary opens at nine every mornig. Visitors who "
    "arive early may wait in the hall. The libary closes at six, and on sundays it does not open at all.",
    "Summarise: The bridge was built in 1874 to carry the railway over the river. It was widened in 1931, closed "
    "in 1968 when the line was abandoned, and opened again in 2004 as a path for walkers and cyclists.",
]

OTHER = [
    "한국의 수도는 어디인가요? 짧게 대답해 주세요.",
    "Describe this sequence and continue it: 2, 4, 8, 16, 32,",
    "Make a table with the columns planet, moons, ring (yes or no) for the eight planets.",
    "Pretend you are a pirate and greet me. Use emoji 🏴‍☠️🦜.",
]

PROMPTS = CHAT + CODE + COPY + OTHER
