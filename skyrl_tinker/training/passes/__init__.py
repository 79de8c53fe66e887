"""Forward and backward of one batch, with a loss per request and recovery from exhausted memory."""
