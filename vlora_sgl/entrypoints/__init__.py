"""HTTP routes of ours on SGLang's application."""
