"""From a store to a drafter that an engine loads: vocabulary, training, export, evaluation."""
