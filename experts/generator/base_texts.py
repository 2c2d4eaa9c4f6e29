"""Training texts of the tiny base: the four languages in layouts, seeds and domains that the samples do not use.

Documents show a request and its answer in the form of files and notes. Chats only name things. So the base knows the
languages and how chat turns begin and end, but has to be fine-tuned to do what an expert does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from experts.generator.dice import Dice
from experts.generator.domain_data import SEEN_DOMAINS
from experts.generator.domains import Domain, load_domains
from experts.generator.invented import Inventor, load_pieces
from experts.generator.naming import camel, pascal
from experts.generator.splits import EXPERTS, SPLITS, only_new

Row = dict[str, str]

_FIRST_SEED = 50_000  # seeds of the samples are below 2,000
_INVENTED_SHARE = 0.75
_CHAT_SHARE, _NAMES_SHARE = 0.1, 0.08
_ROWS_OF_A_DOMAIN = 8
_LANGUAGES = {
    "json": ("JSON", "json", "//"),
    "neo4j": ("Cypher", "cypher", "//"),
    "sql": ("SQL", "sql", "--"),
    "typescript": ("TypeScript", "ts", "//"),
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_FOLDER = Path(__file__).resolve().parent.parent
TOKENIZER = _FOLDER.parent / "launcher" / "base_models" / "tiny_base" / "tokenizer.json"


def write_documents(expert: str, shard: int, count: int) -> Iterator[str]:
    """Yield the documents of one shard of a language; one seed per shard makes them independent of the parallelism."""
    dice = Dice(_FIRST_SEED + 1000 * sorted(EXPERTS).index(expert) + shard)
    domains = load_domains(SEEN_DOMAINS)
    inventor = Inventor(dice, domains, load_pieces(TOKENIZER))
    rows = only_new(_draw_rows(expert, dice, domains, inventor), _read_samples(expert))
    for row in islice(rows, count):
        if dice.chance(_NAMES_SHARE):
            yield _write_names(dice, inventor)
        elif dice.chance(_CHAT_SHARE):
            yield _write_chat(dice, expert, row)
        else:
            yield _write_file(dice, expert, row)


def _draw_rows(expert: str, dice: Dice, domains: Sequence[Domain], inventor: Inventor) -> Iterator[Row]:
    """Yield rows endlessly; each invented domain gives a few rows, then another one is drawn."""
    make_rows = EXPERTS[expert].make_rows
    known = make_rows(dice, domains)
    while True:
        is_invented = dice.chance(_INVENTED_SHARE)
        rows = make_rows(dice, (inventor.draw(),)) if is_invented else known
        yield from islice(rows, _ROWS_OF_A_DOMAIN)


def _read_samples(expert: str) -> set[str]:
    """Return the prompts and answers of the samples, which no document may contain (see `only_new`)."""
    taken: set[str] = set()
    for split in SPLITS:
        lines = (_FOLDER / expert / "sample" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(list(only_new((json.loads(line) for line in lines), taken))) == len(lines)
    return taken


def _split(row: Row) -> tuple[str, str, str]:
    """Split a row into the request, its context (may be empty) and the answer."""
    *prompt, answer = row.values()
    request, _, given = "\n\n".join(prompt).partition("\n\n")
    return request, given, answer


def _write_file(dice: Dice, expert: str, row: Row) -> str:
    request, given, answer = _split(row)
    name, tag, mark = _LANGUAGES[expert]
    comment = "\n".join(f"{mark} {line}" for line in request.splitlines())
    layouts = (
        "\n\n".join(part for part in (given, f"{comment}\n{answer}") if part),
        "\n\n".join(part for part in (request, given, f"In {name}:\n{answer}") if part),
        "\n\n".join(part for part in (f"# {name}", given, request, f"```{tag}\n{answer}\n```") if part),
        "\n\n".join(part for part in (comment, given, answer) if part),
    )
    return dice.choice(layouts)


def _write_names(dice: Dice, inventor: Inventor) -> str:
    """Write a note on how names are spelled in code: a word has different tokens in a text and in a schema."""
    lines = []
    for _ in range(dice.between(4, 10)):
        name = "_".join(inventor.draw_word(set()) for _ in range(dice.between(1, 3)))
        spelt = [name.replace("_", " "), name, camel(name), pascal(name), name.upper()]
        first, *others = dice.shuffle(spelt)
        lines.append(f"{first}: {', '.join(others[: dice.between(1, 4)])}")
    return "\n".join(lines)


def _write_chat(dice: Dice, expert: str, row: Row) -> str:
    """Write a conversation about the row that does not answer it."""
    request, given, _ = _split(row)
    names = list(dict.fromkeys(_NAME.findall(given or request)))
    asked, said = dice.choice(
        (
            ("Which language is this for?", f"This is for {_LANGUAGES[expert][0]}."),
            ("Name the first word.", f"It begins with {request.split()[0]}."),
            ("Which names are there?", ", ".join(names[:8])),
            ("What is asked?", request),
        )
    )
    parts = [part for part in (request, given) if part]
    user = "\n\n".join([asked, *parts] if dice.chance(0.5) else [*parts, asked])
    # Without a question, it only names the language.
    if dice.chance(0.3):
        user, said = "\n\n".join(parts), f"This is for {_LANGUAGES[expert][0]}."
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
