"""Workers without a ``Wrapper``: a watch over their progress, sections, and limits that are learned."""
