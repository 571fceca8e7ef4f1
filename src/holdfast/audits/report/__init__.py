"""The page, its parts, and the other forms of an audit."""
