"""Attaching to SGLang: the only folder that knows its names. Imported inside SGLang's processes."""
