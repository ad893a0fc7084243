"""SentencePiece vocabularies on the `tokenizers` library, id for id.

SentencePiece's BPE merges the neighbours whose union is the best-scored piece; `tokenizers` merges
by a ranked list of pairs. The list is recovered from the scores: every way to cut a piece in two
pieces is a merge, and merges are ranked by the piece they make.

Known differences to SentencePiece, on the edge of what real text reaches: of overlapping pairs that
make the same piece the longer left part wins, not the left-most pair; pieces marked unused take no
part; unigram paths of equal score may be chosen otherwise; with a character map, CR LF counts as
one character; with user-defined pieces, a whole text that spells a byte piece ("<0x41>") is one.
"""

import re
from collections.abc import Iterable
from operator import itemgetter

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxserve.errors import ModelLoadError
from jaxserve.loading.sentencepiece_model import SentencePieceVocabulary
from jaxserve.loading.token_kinds import TokenKind

SPACE = "\u2581"  # how SentencePiece writes a space


def sentencepiece_backend(
    vocabulary: SentencePieceVocabulary, *, merge_space_runs: bool = False
) -> tokenizers.Tokenizer:
    """Build the tokenizer: control and unknown pieces become special tokens.

    merge_space_runs: user-defined pieces made of spaces are reached by merging, as in the
    tokenizer.json files of Gemma, instead of being cut out of the text first. Ids differ only for
    runs longer than the longest such piece.

    A special token in the text starts a new text, which gets its own dummy prefix, as in
    Llama's tokenizer.json.
    """
    user_defined = [
        piece
        for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True)
        if kind == TokenKind.USER_DEFINED and not (merge_space_runs and not piece.strip(SPACE))
    ]
    try:
        _check_kept_by_charsmap(vocabulary, user_defined)
        return _assemble(vocabulary, [piece for piece in user_defined if piece])
    except ModelLoadError:
        raise
    except Exception as error:  # the library's own checks raise bare Exception
        raise ModelLoadError(
            f"the SentencePiece vocabulary of {len(vocabulary.pieces)} pieces is not usable: "
            f"{str(error)[:200]}"
        ) from error


def _assemble(vocabulary: SentencePieceVocabulary, user_defined: list[str]) -> tokenizers.Tokenizer:
    # Cutting at added tokens would give every part a dummy prefix and strip its spaces. Where
    # there is nothing of the kind, added tokens are the faster way.
    whole = not (vocabulary.add_dummy_prefix or vocabulary.remove_extra_whitespaces)
    cut_out = [] if whole else user_defined
    model = _unigram(vocabulary) if vocabulary.unigram else _bpe(vocabulary, bool(cut_out))
    backend = tokenizers.Tokenizer(model)
    if steps := _normalizers(vocabulary):
        backend.normalizer = normalizers.Sequence(steps)
    if cut_out:
        longest_first = sorted(cut_out, key=len, reverse=True)
        pattern = Regex("|".join(map(re.escape, longest_first)))
        backend.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    backend.decoder = _decoder(vocabulary)
    backend.add_special_tokens(_special_tokens(vocabulary))
    if whole:
        backend.add_tokens([AddedToken(piece, normalized=True) for piece in user_defined])
    return backend


def _check_kept_by_charsmap(vocabulary: SentencePieceVocabulary, pieces: list[str]) -> None:
    """SentencePiece shields user-defined pieces from normalisation; here they must not need it."""
    if not vocabulary.charsmap:
        return
    charsmap = normalizers.Precompiled(vocabulary.charsmap)
    for piece in pieces:
        if charsmap.normalize_str(piece).replace(" ", SPACE) != piece:
            raise ModelLoadError(
                f"the SentencePiece vocabulary's user-defined piece {piece[:40]!r} is changed by "
                "its own normalisation, which is not supported; use the tokenizer.json of the model"
            )


def _bpe(vocabulary: SentencePieceVocabulary, whole_words_first: bool) -> models.BPE:
    pieces = vocabulary.pieces
    last_to_first = range(len(pieces) - 1, -1, -1)
    ids = dict(zip(reversed(pieces), last_to_first, strict=True))
    unk = None if vocabulary.unk_id is None else pieces[vocabulary.unk_id]
    return models.BPE(
        vocab=ids,
        merges=_merges(vocabulary),
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=vocabulary.byte_fallback,
        ignore_merges=whole_words_first,
    )


def _merges(vocabulary: SentencePieceVocabulary) -> list[tuple[str, str]]:
    """All pairs whose union is a piece, best piece first. User-defined pieces beat any score."""
    columns = zip(vocabulary.scores, vocabulary.pieces, vocabulary.kinds, strict=True)
    # With equal scores, sorting keeps the order of the ids.
    best_first = [piece for _, piece, kind in columns if kind == TokenKind.USER_DEFINED]
    columns = zip(vocabulary.scores, vocabulary.pieces, vocabulary.kinds, strict=True)
    scored = [(score, piece) for score, piece, kind in columns if kind == TokenKind.NORMAL]
    scored.sort(key=itemgetter(0), reverse=True)
    best_first += [piece for _, piece in scored]
    known = set(best_first)
    return [
        (left, right)
        for piece in best_first
        for cut in range(len(piece) - 1, 0, -1)
        if (right := piece[cut:]) in known and (left := piece[:cut]) in known
    ]


def _unigram(vocabulary: SentencePieceVocabulary) -> models.Unigram:
    scored = list(zip(vocabulary.pieces, vocabulary.scores, strict=True))
    return models.Unigram(scored, vocabulary.unk_id, vocabulary.byte_fallback)


def _normalizers(vocabulary: SentencePieceVocabulary) -> list[normalizers.Normalizer]:
    """SentencePiece's own order: character map, surplus spaces, prefix, spelling of spaces."""
    space = SPACE if vocabulary.escape_whitespaces else " "
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if vocabulary.add_dummy_prefix:
        steps.append(normalizers.Prepend(space))
    if vocabulary.escape_whitespaces:
        steps.append(normalizers.Replace(" ", space))
    if vocabulary.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(space + r"+\z"), ""))
    return steps


def _decoder(vocabulary: SentencePieceVocabulary) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if vocabulary.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if vocabulary.add_dummy_prefix or vocabulary.remove_extra_whitespaces:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


def _special_tokens(vocabulary: SentencePieceVocabulary) -> list[AddedToken]:
    special: Iterable[str] = (
        piece
        for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True)
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN) and piece
    )
    return [AddedToken(piece, special=True, normalized=False) for piece in dict.fromkeys(special)]
