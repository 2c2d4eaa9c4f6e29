"""Invented domains: the structure of a known one with other names, so that a model reads names instead of memorizing.

A model that has seen forty domains a million times has memorized their columns. Here each domain is drawn at random:
some of its names come from other domains, the others are composed of tokens of the tokenizer, so that the model learns
to copy every token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experts.generator.dice import Dice
from experts.generator.domains import Domain, Entity, Field, Link

_REAL_SHARE = 0.4
_SHORTEST, _LONGEST = 3, 14  # letters of a word
_PIECE = re.compile("\u0120?[a-z]{1,9}")  # the tokenizer writes a leading space as U+0120
_LONG_SHARE = 0.3  # names of two words


class Inventor:
    """Draws domains with the structure of the given ones."""

    def __init__(self, dice: Dice, domains: Sequence[Domain], pieces: Sequence[str]) -> None:
        self._dice, self._domains, self._pieces = dice, domains, pieces
        entities = [entity for domain in domains for entity in domain.entities]
        self._nouns = sorted({(entity.name, entity.plural_name) for entity in entities})
        self._verbs = sorted({(link.forward, link.backward) for domain in domains for link in domain.links})
        fields = [field for entity in entities for field in entity.fields]
        self._fields = {kind: sorted({f.name for f in fields if f.kind == kind}) for kind in {f.kind for f in fields}}
        self._options = sorted({option for field in fields for option in field.options})

    def draw(self) -> Domain:
        domain = self._dice.choice(self._domains)
        taken: set[str] = set()
        entities = {entity.name: self._draw_entity(entity, taken) for entity in domain.entities}
        return Domain(
            name=self.draw_word(taken),
            entities=tuple(entities.values()),
            links=tuple(self._draw_link(link, entities, taken) for link in domain.links),
        )

    def _draw_entity(self, entity: Entity, taken: set[str]) -> Entity:
        name, plural = self._dice.choice(self._nouns)
        if name in taken or not self._dice.chance(_REAL_SHARE):
            name = self.draw_word(taken)
            plural = f"{name}s"
        taken |= {name, plural}
        used: set[str] = set()
        return Entity(name, plural, tuple(self._draw_field(field, used, taken) for field in entity.fields))

    def _draw_field(self, field: Field, used: set[str], taken: set[str]) -> Field:
        name = self._dice.choice(self._fields[field.kind])
        if name in used | taken or not self._dice.chance(_REAL_SHARE):
            name = self._draw_name(field, used | taken)
        used.add(name)
        options = tuple(
            self._dice.choice(self._options) if self._dice.chance(_REAL_SHARE) else self.draw_word(set())
            for _ in field.options
        )
        whole = len(set(options)) == len(options)
        return replace(field, name=name, options=options if whole else field.options)

    def _draw_name(self, field: Field, taken: set[str]) -> str:
        """Draw a name with the suffix of the field (`_on`, `_year`, `_kg`), which shows its kind."""
        *stem, end = field.name.split("_")
        words = [self.draw_word(taken) for _ in range(2 if self._dice.chance(_LONG_SHARE) else 1)]
        return "_".join([*words, end] if stem else words)

    def _draw_link(self, link: Link, entities: dict[str, Entity], taken: set[str]) -> Link:
        forward, backward = self._dice.choice(self._verbs)
        if forward in taken or not self._dice.chance(_REAL_SHARE):
            forward = self.draw_word(taken).upper() + "ED"
            backward = f"{forward}_BY"
        taken.add(forward)
        return Link(
            source=entities[link.source].name,
            forward=forward,
            backward=backward,
            target=entities[link.target].name,
            record=None if link.record is None else self._draw_entity(link.record, taken),
        )

    def draw_word(self, taken: set[str]) -> str:
        while True:
            word = "".join(self._dice.choice(self._pieces) for _ in range(self._dice.between(1, 3)))
            if _SHORTEST <= len(word) <= _LONGEST and word not in taken:
                taken.add(word)
                return word


def load_pieces(file: Path) -> tuple[str, ...]:
    """Load the tokens of a tokenizer that consist of lowercase letters."""
    tokens = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    return tuple(sorted({token.lstrip("\u0120") for token in tokens if _PIECE.fullmatch(token)}))
