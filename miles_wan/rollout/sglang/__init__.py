"""The SGLang rollout engine: a server process, the plugin that it loads, and the client that talks to it. Only this
package knows SGLang's names.
"""
