"""How good a model is, and what packing or rounding cost: perplexity, KL divergence, agreement.

text_windows.py cuts a text into windows, teacher_forcing.py runs them through the engine's steps,
position_scores.py reduces logits to a few numbers a position, evaluation.py puts these together,
summary.py and report.py say what came of it.
"""
