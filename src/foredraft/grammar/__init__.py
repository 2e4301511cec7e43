"""Structured output: which tokens a JSON Schema, a regular expression or a grammar admits after a text."""

from foredraft.grammar.grammar import Grammar
from foredraft.grammar.source import Structure, structure_of
from foredraft.grammar.vocabulary import GrammarVocabulary

__all__ = ["Grammar", "GrammarVocabulary", "Structure", "structure_of"]
