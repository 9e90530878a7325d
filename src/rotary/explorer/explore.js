// The address bar says what is shown, and a picture says in words what it shows.
const links = () => document.querySelector("#links-a a[href]");

function follow() {
  const link = links();
  if (link) {
    const query = new URL(link.getAttribute("href"), location.href).search;
    if (query !== location.search) {
      history.replaceState(null, "", query || location.pathname);
    }
  }
  for (const side of ["a", "b"]) {
    const plot = document.getElementById(`plot-${side}`);
    const words = document.querySelector(`#words-${side} [data-testid=markdown]`);
    if (plot && words) {
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", words.textContent.trim());
      words.setAttribute("aria-live", "polite");
    }
  }
  document.querySelector("#error [data-testid=markdown]")?.setAttribute("role", "alert");
}

new MutationObserver(follow).observe(document, { childList: true, subtree: true, characterData: true, attributeFilter: ["href"] });
