"""Parts of scripts/compare.py: prompts, contenders, and the table of what was measured."""
