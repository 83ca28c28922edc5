#!/usr/bin/env python3
"""The `openai` package against a server that runs: usage: openai_client.py [http://127.0.0.1:8000/v1]

Models, a chat as a whole and as a stream, two choices, a stop string, a prompt, the cache, an error."""
import os
import sys
import time

import openai


def main():
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("CHUNKATTN_API_KEY", "none"))
    model = client.models.list().data[0].id
    print(f"model    {model}")
    messages = [{"role": "system", "content": "You are a helpful assistant who answers in one sentence."},
                {"role": "user", "content": "What is the capital of France?"}]

    start, first, text = time.monotonic(), None, ""
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40, stream=True,
                                            stream_options={"include_usage": True})
    for chunk in stream:
        if chunk.usage:
            print(f"\nusage    {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.monotonic()
            text += chunk.choices[0].delta.content
            print(chunk.choices[0].delta.content, end="", flush=True)
    print(f"stream   first token after {first - start:.2f} s")
    assert text, "nothing was streamed"

    whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40, n=2)
    assert len(whole.choices) == 2 and whole.choices[0].message.content == whole.choices[1].message.content == text
    cached = whole.usage.prompt_tokens_details.cached_tokens
    print(f"cache    {cached} of {whole.usage.prompt_tokens} tokens of the prompt")
    assert cached > 0, "the same prompt was not found"

    word = text.split()[2]
    cut = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40, stop=[word])
    assert cut.choices[0].finish_reason == "stop" and word not in cut.choices[0].message.content

    salted = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40,
                                            extra_body={"cache_salt": os.urandom(8).hex()})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0, "another tenant's cache was used"

    prompt = client.completions.create(model=model, prompt="The capital of Germany is", max_tokens=3, temperature=0)
    print(f"prompt   The capital of Germany is{prompt.choices[0].text.rstrip()}")
    try:
        client.chat.completions.create(model=model, messages=messages, temperature=3)
        raise AssertionError("a temperature of 3 was taken")
    except openai.BadRequestError as error:
        assert error.param == "temperature", error
        print(f"error    {error.message}")
    print("openai   all as expected")


if __name__ == "__main__":
    main()
