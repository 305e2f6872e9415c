"""LangGraph's ready-made agent over langchain-openai."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from task import QUESTION, SAMPLING, arguments, report, weather


@tool(return_direct=True)
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return weather(city)


url, model = arguments()
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="x", **SAMPLING)
agent = create_react_agent(chat, [get_weather])
found = agent.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 8})
report(found["messages"][-1].content)
